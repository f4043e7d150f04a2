"""The README's Python examples run as they are printed, each by itself, and its commands are ones that exist."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

import attnorm.analysis.__main__
import attnorm.bench.__main__
import attnorm.catalogue
import attnorm.data.__main__
import attnorm.lengthbench.__main__
import train
from attnorm.training.loop import parse_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
MODULES = {
    "attnorm.analysis": attnorm.analysis.__main__,
    "attnorm.bench": attnorm.bench.__main__,
    "attnorm.catalogue": attnorm.catalogue,
    "attnorm.data": attnorm.data.__main__,
    "attnorm.lengthbench": attnorm.lengthbench.__main__,
}
# What makes a command one of seconds that needs no connection; of an option that is given twice the last counts.
SMALL = {
    "attnorm.analysis selection": "--model synthetic --text README.md --lengths 12 --num-selected 1 4 --num-selected-by-length 2 "
    "--max-rows 4 --max-gradient-rows 1 --temperatures 0.02 1 --steps 0.001 --normalizer l2",
    "attnorm.data": "--corpus python_manual --tokenizer bpe:300 --fit-documents 5",
    "attnorm.lengthbench": "--suite tiny --tasks max_retrieval --normalizers l2 --seeds 1",
}


def in_blocks(text):
    """The arguments of Python in fenced blocks of shell commands, lines that go on joined."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL))
    return commands(re.sub(r"\\\n\s*", "", blocks))


def commands(text):
    found = re.findall(r"""python ((?:train\.py|-m attnorm[.\w]*)(?:"[^"\n]*"|[^"\n'`&|;])*)""", text)
    return [tuple(shlex.split(command)) for command in found]


def in_sentences(text):
    """Those with options in the text between, where a line may end anywhere."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = [commands(code.replace("\n", " ")) for code in re.findall(r"`([^`]*)`", text)]
    return [command for many in found for command in many if has_options(command)]


def in_config(path):
    """Those with options in the docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text()))
    return [command for command in commands(re.sub(r"\\\n\s*", "", doc)) if has_options(command)]


def has_options(command):
    """Else it is the name of a command, as in this sentence: what python -m attnorm.data writes."""
    return any(x.startswith("--") for x in command) and "--help" not in command


IN_BLOCKS = in_blocks(README)
TEXTS = {"README.md": [*IN_BLOCKS, *in_sentences(README)]}
for path in sorted(ROOT.glob("attnorm/*/README.md")):
    TEXTS[str(path.relative_to(ROOT))] = [*in_blocks(path.read_text()), *in_sentences(path.read_text())]
for path in sorted((ROOT / "configs").glob("*.py")):
    TEXTS[f"configs/{path.name}"] = in_config(path)
COMMANDS = [
    pytest.param(x, id=f"{path}: {' '.join(x)}") for path, many in TEXTS.items() for x in dict.fromkeys(many)
]


def test_there_are_examples_and_commands():
    assert len(EXAMPLES) >= 3
    assert len(IN_BLOCKS) >= 8 and {command[0] for command in IN_BLOCKS} == {"train.py", "-m"}
    assert all(len(many) > 0 for many in TEXTS.values())
    found = {command[1] for many in TEXTS.values() for command in many if command[0] == "-m"}
    assert found == set(MODULES)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_has_flags_configs_and_arguments_that_exist(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    if command[0] == "train.py":
        values = flags.FlagValues()
        train._parse_flags(list(command), values)
        if "$" not in " ".join(command):  # a variable of the shell's
            parse_config(values.config.to_dict())
    else:
        module = MODULES[command[1]]
        parser = module._parser()
        options = parser.parse_args(command[2:])
        if module is attnorm.bench.__main__:  # which refuses options that do not belong together
            module._settle(parser, options)


@pytest.mark.parametrize(
    "command",
    [
        "train.py --workdir=runs/a --confg=configs/lm.py",
        "train.py --workdir=runs/a --config=configs/lm.py:normaliser=l2",
        "train.py --workdir=runs/a --config=configs/no_such.py",
        "-m attnorm.bench --context 8 --cost",
        "-m attnorm.lengthbench --suite smal --out DIR",
    ],
)
def test_what_does_not_exist_is_seen(command, monkeypatch):
    """The test above can fail."""
    with pytest.raises(SystemExit):
        test_command_has_flags_configs_and_arguments_that_exist(tuple(shlex.split(command)), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_runs(example):
    subprocess.run([sys.executable, "-c", example], check=True, cwd=ROOT, timeout=300)


def small(command):
    """The command at a size of seconds, but for its folder."""
    if command[0] == "train.py":
        configs = [x.partition("=")[2] for x in command if x.startswith("--config=")] or [
            "configs/counting.py"
        ]
        return ("train.py", f"--config={configs[0].partition(':')[0]}:runlocal")
    (name,) = (name for name in SMALL if " ".join(command[1:]).startswith(name))
    return (*command, *SMALL[name].split())


# With --aot nothing runs, and libtpu is needed.
SMALL_COMMANDS = dict.fromkeys(
    small(command) for command in IN_BLOCKS if not any(x.startswith("--aot") for x in command)
)


@pytest.mark.slow
@pytest.mark.parametrize("command", SMALL_COMMANDS, ids=" ".join)
def test_command_runs_small(command, tmp_path):
    out = f"--workdir={tmp_path / 'out'}" if command[0] == "train.py" else f"--out={tmp_path / 'out'}"
    subprocess.run([sys.executable, *command, out], check=True, cwd=ROOT, timeout=300)
    assert any((tmp_path / "out").iterdir())
