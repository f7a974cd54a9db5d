"""The other end of a LimitedProcess in tests: it does what its messages say."""

from __future__ import annotations

import os
import sys
import time

from qsample.limited_process import (
    Message,
    answer_message,
    limit_memory,
    next_message,
    processor_time,
)


def answer_to(message: Message) -> Message:
    work = message.fields.get("work")
    number = message.fields.get("number", 0)
    if work == "end":
        os._exit(3)
    elif work == "half":  # of an answer
        sys.stdout.buffer.write(b'{"fields": {}, "sizes": [100]}\nabc')
        sys.stdout.buffer.flush()
        os._exit(0)
    elif work == "sleep":
        time.sleep(number)
    elif work == "spin":
        with processor_time(number):
            while True:
                pass
    elif work == "within":
        with processor_time(number):
            pass
        end = time.process_time() + 2 * number
        while time.process_time() < end:
            pass
    elif work == "take":
        limit_memory(64 << 20)
        try:
            bytearray(number)
        except MemoryError:
            return Message({"refused": True})
    return Message({"process": os.getpid(), **message.fields}, message.parts[::-1])


if __name__ == "__main__":
    while (message := next_message()) is not None:
        answer_message(answer_to(message))
