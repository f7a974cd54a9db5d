"""`python -m qsample`, and the script `qsample`.

Until the commands are imported, ctrl-C ends the process at once, as the system does it: there is
nothing to tidy up, and Python would print where the imports are.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Import the command line, and run it."""
    # A signal that the caller ignores stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from qsample.cli import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
