"""The command line as one piece: every command's help, errors, exit codes, `--json` and `--debug`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import long
from commands import run_command

from sectorch.cli.command import FAILED, USAGE, Parser, command_status, writable
from sectorch.cli.main import COMMANDS, GROUPS, SHELLS, overview, parser_of, run, whole_parser
from sectorch.errors import ArgumentError, SectorchError
from sectorch.federated.command import declared
from sectorch.network.federation.programs import command_of

ACTIONS = ("init", "request", "issue", "identity", "show", "pin")
ALL = [*([name] for name in COMMANDS), *(["keys", action] for action in ACTIONS)]
FILES = ["--cert", "none.pem", "--key", "none.pem"]

# What each command refuses before it starts to work: options, and words of the message.
BAD = {
    "server": [
        (["--clients-ca", "none.pem", *FILES], "cannot read"),
        (["--clients-ca", "none.pem", *FILES, "--running", "0"], "--running must be at least 1, got 0"),
    ],
    "answer": [(["none.safetensors", "--name", "b", "--ca", "none.pem", *FILES], "cannot load none.safetensors")],
    "convert": [
        (["none.pt2", "new.safetensors"], "cannot load none.pt2"),
        (["none.pt2", "new.safetensors", "--trust"], "cannot load none.pt2"),
        (["no.such.module:model", "new.safetensors"], "was not called: if you trust that code"),
        (["no.such.module:model", "new.safetensors", "--trust"], "cannot call no.such.module:model"),
        (["torch:there_is_none", "new.safetensors", "--trust"], "cannot call torch:there_is_none"),
        (["os:getcwd", "new.safetensors", "--trust"], "gives str, expected (model, example inputs)"),
    ],
    "query": [
        (["b", "none.npy", "--ca", "none.pem", *FILES], "cannot read none.npy"),
        (["b", "--ca", "none.pem", *FILES, "none.npy"], "cannot read none.npy"),
        (["b", "--ca", "none.pem", *FILES], "name a file of inputs"),
        (["b", "--prepare", "-1", "--ca", "none.pem", *FILES], "--prepare must be at least 0, got -1"),
        (["b", "x.npy", "--batch", "0", "--ca", "none.pem", *FILES], "--batch must be at least 1, got 0"),
        (["b", "x.npy", "--audited", "0", "--ca", "none.pem", *FILES], "--audited must be at least 1, got 0"),
        (["b", "x.npy", "--activation-limit", "3", "--ca", "none.pem", *FILES], "activation_limit is a power of two"),
        (["b", "x.npy", "--activation-limit", "4194304", "--ca", "none.pem", *FILES], "leave no room for weights"),
    ],
    "models": [(["--ca", "none.pem", *FILES], "cannot read")],
    "keys": [(["show", "none.pem"], "cannot read none.pem"), (["issue", "none", "alice.csr"], "cannot read alice.csr"),
        (["issue", "none", "alice"], "`sectorch keys request alice`, then here `sectorch keys issue none alice.csr`"),
        (["issue", "none", "s", "--host", "localhost"],
            "`sectorch keys request s --server`, then here `sectorch keys issue none s.csr --host localhost`"),
        (["issue", "none", "hospital b"], "run `sectorch keys request NAME`, then here"),
        (["issue", "none", "x.csr", "--days", "inf"], "--days must be above 0 and at most 36500, got inf"),
        (["request", "../evil"], "1 to 64 letters (ASCII), digits and _ . - @"),
        (["request", "hospital b"], "1 to 64 letters (ASCII), digits and _ . - @"),
        (["pin", "alice ", "SHA256:" + "a" * 43, "--pins", "pins"], "1 to 64 letters (ASCII), digits and _ . - @"),
        (["pin", "alice", "SHA256:", "--pins", "pins"], "a fingerprint is SHA256: and 43 characters"),
    ],
    "privhfl": [
        (["--clients", "1000"], "1000 clients with 30 samples each need 30000"),
        (["--clients", "1"], "clients must be at least 2, got 1"),
        (["--alpha", "-1"], "alpha must be above 0"),
        (["--alpha", "nan"], "alpha must be above 0"),
        (["--classes-each", "0"], "--classes-each must be"),
        (["--local-epochs", "-3"], "--local-epochs must be at least 0, got -3"),
        (["--retraining-epochs", "-1"], "--retraining-epochs must be at least 0, got -1"),
        (["--samples", "0"], "samples must be at least 1"),
        (["--iterations", "0"], "iterations must be at least 1"),
        (["--queries", "0"], "queries must be at least 1"),
        (["--chunk", "-5"], "chunk must be at least 1"),
    ],
    "capc": [
        (["--parties", "100000"], "100000 clients with 0 samples"),
        (["--parties", "0"], "--parties must be at least 2"),
        (["--querying", "0"], "querying must be at least 1"),
        (["--pool", "0"], "pool must be at least 1"),
        (["--models-each", "0"], "--models-each must be at least 1"),
        (["--chunk", "0"], "chunk must be at least 1"),
        (["--queries", "-1"], "queries must be at least 1"),
        (["--scale", "0"], "scale must be above 0"),
        (["--scale", "-1"], "scale must be above 0"),
        (["--frac-bits", "99"], "--frac-bits must be at least 1 and at most 26"),
        (["--epsilon", "nan"], "epsilon must be"),
    ],
    "capride": [
        (["--parties", "100000"], "100000 clients"),
        (["--parties", "1"], "parties must be at least 2"),
        (["--split", "heterogeneous", "--alpha", "-1"], "alpha must be above 0"),
        (["--samples", "0"], "samples must be at least 1"),
        (["--split", "no-overlap", "--samples", "-5"], "samples must be at least 1"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--batch", "1"], "batch must be at least 2"),
        (["--rate", "nan"], "rate must be above 0"),
        (["--fraction", "0"], "fraction must be above 0"),
        (["--levels", "-1"], "levels"),
        (["--delta", "1"], "delta must be above 0"),
    ],
    "perturbed-fl": [
        (["--clients", "100000"], "100000 clients for"),
        (["--clients", "0"], "clients must be at least 1"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--batch-size", "-1"], "--batch-size must be at least 1"),
        (["--local-batches", "0"], "--local-batches must be at least 1"),
        (["--learning-rate", "nan"], "--learning-rate must be above 0"),
        (["--momentum", "1"], "momentum must be"),
        (["--weight-decay", "-1"], "--weight-decay must be"),
        (["--partitions", "0"], "partitions must be at least 1"),
        (["--threads", "0"], "threads must be at least 1"),
        (["--data", "cifar100"], "or name another folder (root=, --data-root"),
    ],
    "shapley": [
        (["--clients", "100000"], "100000 clients with at least"),
        (["--clients", "1"], "clients must be at least 2"),
        (["--clients", "30"], "2^30 - 1 coalitions"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--epochs", "-3"], "epochs must be at least 1"),
        (["--alpha", "-1"], "alpha must be above 0"),
        (["--samples", "0"], "samples must be at least 1"),
        (["--tests", "-3"], "tests must be at least 1"),
        (["--model", "dnn", "--hidden", "9"], "hidden must be at least 0 and at most 7"),
        (["--model", "cnn", "--clients", "2"], "need 3 clients"),
        (["--processes", "0"], "processes must be at least 1"),
        (["--skip", "--protocol", "hesv"], "HESV encrypts"),
        (["--leave", "c9:1-1"], "clients are c1"),
    ],
    "bench": [
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--batches", "0"], "--batches must be at least 1, got 0"),
        (["--mbit", "0"], "--mbit must be above 0, got 0"),
    ],
}  # fmt: skip
CASES = [(name, *case) for name, cases in BAD.items() for case in cases]
FOLDERS = ("privhfl", "capc", "capride", "perturbed-fl", "shapley", "bench")
"""Commands that leave a folder of results."""
QUICK = {
    "privhfl": "--clients 3 --samples 20 --local-epochs 1 --retraining-epochs 1 --queries 4 --no-plots "
    "--architectures mlp",
    "capc": "--parties 12 --querying 1 --pool 4 --epsilon 20 --inference simulated --no-plots --architectures mlp",
    "capride": "--samples 60 --rounds 1 --warmup 2 --epochs 1 --head-rank 4 --simulate --no-plots",
    "perturbed-fl": "--clients 2 --rounds 2 --model mlp3 --no-plots",
    "shapley": "--clients 4 --rounds 1 --samples 60 --tests 20 --protocol plain --no-plots",
}


def one_line(text: str) -> bool:
    return text.startswith("error: ") and text.count("\n") == 1 and text.endswith("\n")


def name_of(case) -> str:
    return " ".join(case) if isinstance(case, list) else str(case)


def test_the_overview_is_a_screen_with_every_command():
    lines = overview().splitlines()
    assert len(lines) <= 36 and max(map(len, lines)) <= 80
    for group, commands in GROUPS.items():
        assert f"{group}:" in lines
        for name, (_, what) in commands.items():
            assert any(line.split(maxsplit=1) == [name, what] for line in lines), name


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_is_the_overview(arguments, capsys):
    assert run(arguments) == 0
    assert capsys.readouterr().out.strip() == overview()


def test_an_unknown_command_is_one_line_with_a_guess(capsys):
    assert run(["privfl", "--clients", "3"]) == 2
    shown = capsys.readouterr()
    assert one_line(shown.err) and "perhaps privhfl" in shown.err and shown.out == ""


def test_the_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("sectorch ")


@pytest.mark.parametrize("command", ALL, ids=name_of)
def test_help_has_an_example(command, capsys):
    """It stands at the end, and is a command line of this command."""
    with pytest.raises(SystemExit) as stopped:
        run([*command, "--help"])
    shown = capsys.readouterr()
    assert stopped.value.code == 0 and shown.err == ""
    examples = shown.out.split("examples:\n")[1].splitlines()
    assert examples and all(line.startswith(f"  sectorch {' '.join(command)}") for line in examples)
    assert "--debug" in shown.out


@pytest.mark.parametrize("command", ALL, ids=name_of)
def test_an_unknown_option_exits_2_in_one_line(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        run([*command, "--no-such-option"])
    shown = capsys.readouterr()
    assert stopped.value.code == 2 and shown.out == ""
    assert one_line(shown.err) and f"sectorch {command[0]}" in shown.err and "--help lists the options" in shown.err


@pytest.mark.parametrize("name, options, words", CASES, ids=name_of)
def test_bad_input_is_one_line_before_any_work(name, options, words, tmp_path, capsys, monkeypatch):
    """Nothing is written: a run makes its folder before it trains."""
    monkeypatch.chdir(tmp_path)
    status = ended_with([name, *options])
    shown = capsys.readouterr()
    assert one_line(shown.err) and words in shown.err and shown.out == ""
    assert status == (USAGE if "--help lists the options" in shown.err else FAILED)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["model.pt2", "model.safetensors"])
def test_a_file_that_holds_no_model_is_one_line(name, tmp_path, capsys):
    (tmp_path / name).write_bytes(b"not a model")
    assert run(["answer", str(tmp_path / name), "--name", "b", "--ca", "none.pem", *FILES]) == 1
    assert one_line(capsys.readouterr().err)
    assert run(["convert", str(tmp_path / name), str(tmp_path / "new.out"), "--trust"]) == 1
    assert one_line(capsys.readouterr().err) and not (tmp_path / "new.out").exists()


def ended_with(words) -> int:
    try:
        return run(words)
    except SystemExit as stopped:
        return stopped.code


@pytest.mark.parametrize("name", FOLDERS[:-1])
def test_a_number_that_a_paper_s_option_does_not_take_names_the_option(name, tmp_path, capsys, monkeypatch):
    """Each of them, the least one less 1 or the bound that is outside: before the run, and without a traceback."""
    monkeypatch.chdir(tmp_path)
    command = command_of(name)
    wrong = {}
    for cls in (type(command.federation), type(command.settings)):
        for field, kind, _, option in declared(cls):
            if not option.hidden and kind in (int, float) and (option.least, option.above) != (None, None):
                flag = "--" + (option.flag or field).replace("_", "-")
                wrong[flag] = str(kind(option.above if option.least is None else option.least - 1))
    assert wrong
    for flag, value in wrong.items():
        assert ended_with([name, flag, value]) == USAGE
        said = capsys.readouterr().err
        assert one_line(said) and said.startswith(f"error: {flag} must be ") and f", got {value};" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name for name in BAD if name != "bench"])
@pytest.mark.parametrize("first", [True, False])
def test_debug_shows_the_traceback(name, first, tmp_path, monkeypatch):
    """Before the command and after it. What is raised leaves the program, and Python prints the traceback."""
    monkeypatch.chdir(tmp_path)
    options, _ = BAD[name][0]
    with pytest.raises(SectorchError):
        run(["--debug", name, *options] if first else [name, *options, "--debug"])


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_written_to_is_refused_at_once(name, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run([name, "--out", str(tmp_path / "file" / "run")]) == 1
    shown = capsys.readouterr()
    assert one_line(shown.err) and "cannot write to" in shown.err and "--out" in shown.err


def test_trying_a_folder_leaves_no_trace(tmp_path):
    writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", QUICK)
def test_json_is_all_of_standard_output_and_the_file(name, tmp_path, capsys):
    assert run([name, *QUICK[name].split(), "--json", "--out", str(tmp_path / "run")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "run" / "results.json").read_text())


def test_json_of_ops_and_keys(tmp_path, capsys):
    def of(*arguments: str):
        assert run([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert {"name", "kind", "note"} <= of("ops")[0].keys()
    pki = tmp_path / "pki"
    assert of("keys", "init", str(pki)) == {"ca": str(pki / "ca.pem")}
    made = of("keys", "request", "alice", "--folder", str(tmp_path / "alice"))
    assert all(Path(made[what]).is_file() for what in ("request", "key", "identity"))
    assert of("keys", "show", made["identity"]) == {"fingerprint": made["fingerprint"]}
    issued = of("keys", "issue", str(pki), made["request"])
    assert issued == {"certificate": str(pki / "alice.pem"), "ca": str(pki / "ca.pem")}
    asked = of("keys", "request", "server", "--server", "--folder", str(tmp_path))
    assert set(asked) == {"request", "key"}
    assert set(of("keys", "issue", str(pki), asked["request"], "--host", "localhost")) == {"certificate", "ca"}
    assert {path.name for path in pki.iterdir()} == {"ca.pem", "ca-key.pem", "alice.pem", "server.pem"}, "no one's keys"
    pins = tmp_path / "pins"
    assert of("keys", "pin", "alice", made["fingerprint"], "--pins", str(pins))["pins"] == str(pins)
    assert of("keys", "identity", str(tmp_path / "bob.pem"))["fingerprint"].startswith("SHA256:")


def test_without_json_results_are_for_people(capsys):
    assert run(["ops"]) == 0
    shown = capsys.readouterr()
    assert "operation" in shown.out and shown.err == ""


def test_operations_by_a_part_of_their_names(capsys):
    assert run(["ops", "Conv2", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert "conv2d" in names and all("conv2" in name.lower() for name in names)
    assert run(["ops", "cnov"]) == FAILED
    assert "no operation has 'cnov' in its name; sectorch ops lists them all" in capsys.readouterr().err


def quick_parser() -> Parser:
    parser = Parser("quick", "Does nothing.", ["sectorch quick"])
    parser.writes_results("runs/quick")
    return parser


def raising(error: BaseException) -> Callable:
    """A command's work that ends so, of no file: what comes through a file of its user's is said to be there."""
    made: dict[str, Any] = {"error": error}
    exec(compile("def work(options, console): raise error", "<work>", "exec"), made)
    return made["work"]


@pytest.mark.parametrize(
    "error, code, words",
    [
        (KeyboardInterrupt(), 130, "stopped; what is finished is in here\n"),
        (ArgumentError("what came,\nwhat was expected"), 1, "error: what came, what was expected\n"),
        (PermissionError(13, "Permission denied", "x/y"), 1, "error: Permission denied: x/y\n"),
        (KeyError("x"), 1, "error: KeyError: 'x'; this should not happen: please report it with what --debug adds\n"),
    ],
)
def test_how_a_run_ends(error, code, words, capsys):
    assert (
        command_status(quick_parser(), ["--out", "here"], raising(error), "stopped; what is finished is in {out}")
        == code
    )
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", words)
    if code == 1:
        with pytest.raises(type(error)):
            command_status(quick_parser(), ["--debug"], raising(error))


def test_the_program():
    """As the shell sees it: exit codes, and a traceback with --debug only."""

    def done(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "sectorch.cli.main", *arguments]
        process = run_command(command, timeout=120)
        assert process.stdout == ""
        return process.returncode, process.stderr

    code, text = done("keys", "show", "none.pem")
    assert code == 1 and one_line(text)
    code, text = done("--debug", "keys", "show", "none.pem")
    assert code == 1 and text.startswith("Traceback") and "ArgumentError: cannot read none.pem" in text
    code, text = done("keys", "show")
    assert code == 2 and one_line(text)


@pytest.mark.parametrize("words", [["--help"], *long(["ops", "--json"])])
def test_nobody_reads_its_output(words):
    """As `sectorch --help | head` ends: no traceback."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "sectorch.cli.main", *words]
    try:
        process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    finally:
        os.close(write)
    assert (process.returncode, process.stderr) == (141, "")


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))  # pyright: ignore[reportReturnType]


def test_completion_has_each_commands_own_options():
    """The parser that shtab is given; to make it no command has run."""
    commands = subcommands(whole_parser())
    assert list(commands) == list(COMMANDS)
    for name, parser in commands.items():
        assert set(parser._option_string_actions) == set(parser_of(name)._option_string_actions) > {"--debug"}, name
    assert set(ACTIONS) <= set(subcommands(commands["keys"]))
    assert "--inference" in commands["capc"]._option_string_actions


COMPLETED = {
    ("se",): {"server"}, ("keys", "re"): {"request"},
    ("capc", "--infer"): {"--inference"}, ("capc", "--inference", "m"): {"mpc"},
}  # fmt: skip
"""The words that are written after `sectorch`, and what they are completed to."""


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_a_script_of_the_shell(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("shtab", reason="needs the completion extra: pip install '.[completion]'")
    assert run(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    assert "--inference" in script.read_text(encoding="utf-8")
    if shell != "bash" or shutil.which("bash") is None:
        return
    for words, found in COMPLETED.items():
        line = f"COMP_WORDS=(sectorch {shlex.join(words)}); COMP_CWORD={len(words)}"
        call = f"$(complete -p sectorch | sed 's/.*-F \\([^ ]*\\).*/\\1/') sectorch {words[-1]}; echo ${{COMPREPLY[@]}}"
        asked = subprocess.run(
            ["bash", "-c", f"source {script}; {line}; {call}"], capture_output=True, text=True, timeout=60, check=True
        )
        assert set(asked.stdout.split()) == found, (words, asked)
