"""The project around the code: imports, documents, links, what a newcomer types."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from qsample.errors import DISTRIBUTION

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
CI = (ROOT / ".ci" / "run").read_text("utf-8")
CHECK = (ROOT / "scripts" / "check").read_text("utf-8")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
SKIPPED = {
    ".git",
    ".venv",
    "__pycache__",
    ".hypothesis",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".import_linter_cache",
}
LINKS = (
    "transforms",
    "exporters",
)  # at the root; files in a checkout without symbolic links, as Windows may make it
HEAVY = ["torch", "transformers", "onnx", "onnxscript", "onnx_ir"]


def python(code: str, **environment: str) -> str:
    """The standard output of `code` in a fresh interpreter."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment or None
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def files() -> list[Path]:
    """What belongs to the project: what git tracks, or would; every file where this is no clone."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    paths = [ROOT / name for name in done.stdout.split("\0")[:-1]] or [*ROOT.rglob("*")]
    return [
        path
        for path in paths
        if path.is_file() and path.name not in LINKS and not SKIPPED & {*path.parts}
    ]


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_importing_loads_nothing_heavy() -> None:
    heavy = [*HEAVY, "onnxruntime", "numpy", "tokenizers"]
    code = f"import sys, qsample.cli, qsample.models.bundled; print([name for name in {heavy} if name in sys.modules])"
    assert python(code) == "[]\n"


def test_nothing_is_sent_and_no_id_is_kept(llama_package: Path, tmp_path: Path) -> None:
    """Neither by Python, nor by ONNX Runtime, whose builds keep an id in the cache folder and look for a host."""
    code = f"""
import os, sys
seen = []
sys.addaudithook(lambda event, arguments: event.startswith("socket.") and seen.append(event))
import qsample.cli
from qsample.runtime import load
load({str(llama_package)!r}).generate([[5, 6, 7]], max_new_tokens=3)
links = [f"/proc/self/fd/{{number}}" for number in range(256)]  # on Linux
print(seen, [link for link in links if os.path.lexists(link) and os.readlink(link).startswith("socket:")])
"""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CI", "ORT_DISABLE_TELEMETRY")
    }
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert python(code, **{**kept, **home}) == "[] []\n"
    assert [path.name for path in tmp_path.rglob("*") if "microsoft" in str(path).lower()] == []


def import_without(missing: list[str], modules: str) -> None:
    # None in sys.modules makes an import of that name fail, as if it were not installed.
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing})); import {modules}; print('fine')"
    )
    assert python(code) == "fine\n"


def test_the_runtime_side_imports_where_the_export_side_is_missing() -> None:
    import_without(
        HEAVY,
        "qsample.runtime, qsample.package, qsample.models.auto_model, qsample.cli, qsample.addons.evaluate",
    )
    import_without(HEAVY, "qsample.runtime.engine, qsample.runtime.causal_lm, qsample.ort.session")


@pytest.mark.ci
def test_graphs_are_made_where_torch_is_missing() -> None:
    modules = "exporters.portable", "exporters.parity", "compiler.compile", "compiler.targets.cuda"
    import_without(
        ["torch", "transformers", "safetensors"], ", ".join(f"qsample.{name}" for name in modules)
    )


def test_the_public_names_are_listed_and_found() -> None:
    import qsample

    assert set(qsample.__all__) <= set(dir(qsample))
    assert all(getattr(qsample, name) is not None for name in qsample.__all__)
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = qsample.NoSuchName


def test_the_tables_in_the_documents_are_those_of_the_contract() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/contract_tables.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run: python scripts/contract_tables.py"


def test_the_documents_hold_every_table() -> None:
    source = (ROOT / "scripts" / "contract_tables.py").read_text("utf-8")
    tables = set(re.findall(r'^    "(\w+)": ', source, re.MULTILINE))
    text = "".join(path.read_text("utf-8") for path in DOCUMENTS)
    assert tables == set(re.findall(r"<!-- table: (\w+) -->\n\|", text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_in_the_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text("utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_readme_has_two_commands_and_ci_runs_the_second() -> None:
    first, second = [block.strip() for block in code_blocks(README, "bash")[:2]]
    assert "\n" not in first
    assert "\n" not in second
    assert "qsample generate" in first
    install, tests = second.removeprefix("python3 -m venv .venv && ").split(" && ")
    quiet = install.replace(".venv/bin/pip install", '"$bin/pip" install --quiet --no-compile')
    assert quiet.replace("test]", "test,docs]") in CI.splitlines()
    # pytest's summary is the last output of both.
    assert CI.splitlines()[-1] == 'bash scripts/check "$bin"'
    assert CHECK.splitlines()[-1] == tests.replace(".venv/bin/pytest", 'step "$bin/pytest"')


def test_the_readme_and_its_page_of_devices_name_options_that_exist() -> None:
    files = [
        *(ROOT / "qsample" / "cli").rglob("*.py"),
        ROOT / "qsample" / "compiler" / "options.py",
    ]
    source = "".join(path.read_text("utf-8") for path in files)
    known = {
        name.replace("_", "-") for name in re.findall(r"^    (\w+): \w+", source, re.MULTILINE)
    }
    known |= {option[2:] for option in re.findall(r"--[a-z-]+", source)}
    pages = README, (ROOT / "docs" / "devices.md").read_text("utf-8")
    for block in (block for page in pages for block in code_blocks(page, "bash")):
        for line in block.replace("\\\n", " ").splitlines():
            if "qsample " in line:
                used = re.findall(r" --([a-z][a-z-]*)", line.split("qsample ", 1)[1])
                assert set(used) <= known, line


def test_the_python_in_the_readme_compiles() -> None:
    blocks = code_blocks(README, "python")
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the links are not part of the sdist")
def test_the_links_at_the_root() -> None:
    for name in LINKS:
        if (ROOT / name).is_symlink():
            assert (ROOT / name).resolve() == ROOT / "qsample" / name
        else:
            assert (ROOT / name).read_text("utf-8") == f"qsample/{name}"


@pytest.mark.ci
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="there is nothing to clone")
def test_a_checkout_without_symbolic_links(tmp_path: Path) -> None:
    clone = ["git", "clone", "-q", "-c", "core.symlinks=false", str(ROOT), str(tmp_path / "clone")]
    subprocess.run(clone, check=True)
    assert not (tmp_path / "clone" / LINKS[0]).is_symlink()
    tests = [
        "tests/test_project.py",
        "tests/transforms/test_cache.py",
        "-k",
        "root or sdist or cache",
    ]
    run = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(run, cwd=tmp_path / "clone", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="only a clone knows what belongs to the project"
)
def test_the_sdist_holds_what_belongs_to_the_project() -> None:
    """Its tests read most of it. And the page of `qsample web`, if it is built."""
    sdist = pytest.importorskip("hatchling.builders.sdist").SdistBuilder(str(ROOT))
    page = {path for path in (ROOT / "qsample" / "assets" / "web").rglob("*") if path.is_file()}
    assert {Path(file.path) for file in sdist.recurse_included_files()} == set(files()) | page


def test_an_index_shows_the_readme_without_links_into_the_repository() -> None:
    pytest.importorskip("hatchling")
    from scripts.index_readme import index_readme

    shown = index_readme(README)
    assert re.findall(r"\]\((?!https?://)", shown) == []
    assert "- docs/contract.md: every input" in shown
    assert "](https://host/blob/v1/docs/contract.md): every input" in index_readme(
        README, "https://host/blob/v1"
    )


def test_the_version_is_the_newest_of_the_changelog() -> None:
    import qsample

    versions = re.findall(
        r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    npm = json.loads((ROOT / "js" / "package.json").read_text("utf-8"))
    assert versions[0] == qsample.__version__ == npm["version"]


def test_one_name_everywhere() -> None:
    """`qsample` on PyPI is another project: an instruction to install it would install that."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (
        project["name"]
        == json.loads((ROOT / "js" / "package.json").read_text("utf-8"))["name"]
        == DISTRIBUTION
    )
    others = [
        re.compile(
            r"(?:pip3?|uv|npm|pnpm|yarn) [^\n`&|;]*\b(?:install|add|i) (?:[^\n`&|;]* )?['\"]?qsample(?![\w/.-])"
        ),
        re.compile(r"qsample\[[a-z]+[],]"),  # an extra
        re.compile(r"from ['\"]qsample(?:/\w+)?['\"]"),  # an import in JavaScript
    ]
    for wrong in (
        "pip install -U 'qsample[cpu]'",
        "uv pip install qsample",
        "npm i qsample",
        'from "qsample";',
    ):
        assert any(other.search(wrong) for other in others), wrong
    for right in (
        "pip install 'qsample-onnx[cpu]'",
        "pip install -e '.[cpu]' && qsample serve",
        "from qsample import x",
    ):
        assert not any(other.search(right) for other in others), right
    texts = {
        path: path.read_bytes().decode("utf-8", "replace")
        for path in files()
        if path != Path(__file__)
    }
    assert [
        (str(path), found[0])
        for path, text in texts.items()
        for other in others
        if (found := other.search(text))
    ] == []
    code = [
        text
        for path, text in texts.items()
        if {ROOT / "qsample", ROOT / "js" / "src"} & {*path.parents}
    ]
    assert [
        text for text in code if re.search(r"install[^\n]*qsample-onnx", text)
    ] == []  # `install_hint` says it


def test_the_licence_is_the_apache_licence() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_exceptions_from_the_limits_of_functions_only_shrink() -> None:
    """ruff's C901 (branches) and PLR0913 (parameters). Lower the number if you mend one; never raise it."""
    marked = [
        f"{path}: {line.strip()}"
        for path in sorted((ROOT / "qsample").rglob("*.py"))
        for line in path.read_text("utf-8").splitlines()
        if re.search(r"noqa:.*\b(?:C901|PLR09\d\d)\b", line)
    ]
    assert len(marked) <= 2, marked
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]
    assert {"C901", "PLR0913"} <= {*settings["select"]}
    assert settings["mccabe"] == {"max-complexity": 10}
    assert settings["pylint"] == {"max-args": 8}
    ignored = {path for path, rules in settings["per-file-ignores"].items() if "C901" in rules}
    assert not any("qsample" in path for path in ignored)


# Parts of torch, transformers, onnxruntime, re and typing.NamedTuple that have no public name.
FOREIGN_MEMBERS = {
    *("_replace", "_schema", "_to_copy", "_attn", "_apply_gate"),
    *("_can_set_attn_implementation", "_can_set_experts_implementation", "_experts_implementation"),
    *("_attn_implementation", "_deepstack_process", "_sess"),
    *("_parser", "_constants"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_private_names_are_used_by_their_own_module_and_object() -> None:
    found = []
    for path in sorted((ROOT / "qsample").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qsample"):
                found += [f"{path}: {alias.name}" for alias in node.names if is_private(alias.name)]
            if (
                isinstance(node, ast.Attribute)
                and is_private(node.attr)
                and node.attr not in FOREIGN_MEMBERS
            ):
                own = ast.unparse(node.value) in ("self", "cls", "super()")
                found += [] if own else [f"{path}:{node.lineno}: {ast.unparse(node)}"]
    assert found == []


def test_every_room_is_in_the_map_of_the_house() -> None:
    house = (
        (ROOT / "docs" / "architecture.md")
        .read_text("utf-8")
        .split("## The house")[1]
        .split("\n## ")[0]
    )
    package = ROOT / "qsample"
    rooms = {
        path.name for path in package.iterdir() if path.is_dir() and (path / "__init__.py").exists()
    }
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert {name for name in rooms if f"{name}/" not in house} == set()
    assert modules - set(re.findall(r"\w+\.py", house)) == set()


def test_no_file_is_larger_than_4_mib() -> None:
    assert [path for path in files() if path.stat().st_size > 4 << 20] == []


def test_no_file_names_a_machine_of_its_authors() -> None:
    words = re.compile(r"/(?:work|home/\w+|root|tmp/w)/|/opt/(?:wheels|pypi)")
    named = [
        path
        for path in files()
        if path.suffix in {".py", ".md", ".toml", ".json", ".sh", ""} and path != Path(__file__)
    ]
    assert [path for path in named if words.search(path.read_text("utf-8", errors="replace"))] == []


def test_the_two_onnxruntime_distributions_never_come_together() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    for name, requirements in extras.items():
        runtimes = {re.split(r"[^\w-]", line)[0] for line in requirements} & {
            "onnxruntime",
            "onnxruntime-gpu",
        }
        assert runtimes == {
            "cpu": {"onnxruntime"},
            "bake": {"onnxruntime"},
            "gpu": {"onnxruntime-gpu"},
        }.get(name, set())
