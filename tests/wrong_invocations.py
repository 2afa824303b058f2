"""Wrong invocations of the command line, by what is wrong about them.

What is named in braces is made for each test: `{model}` a tiny model, `{data}` rows with passages, `{store}` a store,
`{keys}` a file of keys, `{tmp}` an empty folder, `{file}` a text file, `{broken}` damaged JSON, `{list}` JSON that is a
list, `{surrogate}` rows with a lone surrogate, `{busy}` a port that is taken, `{nothing}` an
empty file, `{pipe}` a pipe.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from hypothesis import strategies as st

from cacheblend.serve.keys import add_key
from cacheblend.store import open_store
from tiny_folder import TinyShape, build_tiny

PASSAGE = "The lighthouse was lit in 1871 and its keepers wrote down the weather."
SHAPE = TinyShape(layers=2, width=32, mlp_width=48, heads=2, kv_heads=1, vocab_size=300, context_length=256)

ASK = "ask -m {model} -s memory -q Why?"
WARM = "warm -m {model} -s {tmp}/s -d {data}"
EVALUATE = "evaluate -m {model} -d {data}"
SERVE = "serve -m {model} --port 0"
CALIBRATE = "calibrate -m {model} -s {tmp}/s --out {tmp}/cost.json"
PLAN = "plan -m {model} --prefill-s 1"
GATE = "doctor --quality -m {model} -d {data} --dry-run"
TTFT = "bench ttft --shape tiny"
INSPECT = "inspect -m {model} -q Why? -p text"

SAID = {
    "warm -m {model} -s {tmp}/s -d {tmp}/none.json": "none.json cannot be read",
    "warm -m {model} -s memory -d {data}": "ends with this command",
    "warm -m {model} -s {tmp}/s -d {data} --engine vllm --device cpu --chat": "--device and --chat: no",
    "warm -m {model} -s {tmp}/s -d {data} --system A": "--system: no effect without --anchor system",
    "sync -m {model} -s {tmp}/s --source {tmp} --no-chat": "--chat: no effect without --anchor system",
    f"{ASK} --row 7": "--row 7: no effect without --data",
    "warm -m {tmp}/none -s {tmp}/s -d {data}": "is no folder",
    "warm -m {tmp} -s {tmp}/s -d {data}": "config.json",
    "warm -m {model} -s {tmp}/s -d {tmp}/none": "there is no such file; passages come as .json",
    "warm -m {model} -s {tmp}/s -d {tmp}/none.csv": "there is no such file; passages come as .json",
    "warm -m {model} -s {tmp}/s -d {nothing}": "the name has no ending; passages come as .json",
    "warm -m {model} -s {tmp}/s -d {pipe}": "it is a pipe or a device, not a file",
    f"{WARM} --anchor x": "anchor must be one of",
    f"{WARM} --block-size 0": "--block-size: 0 is out of range, 1..",
    "ask -m {model} -s memory": "no question",
    "ask -m {model} -s gs://x -q ?": "gs",
    "ask -m {model} -q Why? -s {file}": "is not a folder",
    "ask -m {model} -s memory -d {data} --row 7": "rows 0..0, not 7",
    f"{ASK} -r 1.5": "0..1, got 1.5",
    f"{ASK} -r 0.5,0.2": "2 ratios need as many",
    f"{ASK} --check-layers 1,2 -r 0.2,0.5": "must not rise",
    f"{ASK} -r 1,0 --selector head": "hkvd",
    f"{ASK} --check-layers 2 --measure v --selector head": "--measure: no effect with --selector head",
    f"{ASK} --selector threshold:threshold=0.5 -r 0.9": "--ratio: no effect with --selector threshold",
    f"{ASK} --check-layers 9": "check layer 9",
    f"{ASK} --selector best": "'best'",
    f"{ASK} --selector threshold": "the selector 'threshold' needs a bound; set `threshold`",
    f"{ASK} --selector hybrid:hops=5": "hops must be a whole number, 0 to 4",
    f"{ASK} --selector query:hops=1,hop_spans=9": "hop_spans must be",
    f"{ASK} --dtype int8": "int8",
    f"{ASK} --device moon": "moon",
    f"{ASK} -n 0": "--max-tokens: 0 is out of range, 1..",
    f"{ASK} -p @{{tmp}}/none": "cannot be read",
    f"{ASK} -p @{{tmp}}/[/b]": "[/b]: the file cannot be read",
    f"{ASK} --chat": "no chat template",
    "ask -m {model} -s memory -q ? -p ": "-p: the value is empty",
    f"ask -m {{model}} -s memory -q ? -p {'word ' * 900}": "context",
    "plan -m {model} --prefill-s 0": "--prefill-s 0: the seconds of a full prefill must be above 0",
    "plan -m {model} --prefill-s -2": "--prefill-s -2: the seconds of a full prefill must be above 0",
    "store ls {data}": "is not a folder",
    "store ls {tmp}/none[/b]": "none[/b]: check the path",
    "store stat memory": "name a folder",
    "store prune {tmp} --max-bytes much": "not a size",
    "keys add x --file {nothing}": "is empty and has no keys; delete it",
    "keys add x --file {tmp}": "is a folder; name a file",
    "keys ls --file {tmp}": "is a folder; name a file",
    "doctor": "--model",
    "doctor --shape round": "no shape is called",
    "doctor -m {model} -d {data}": "no effect without --quality",
    "doctor --quality -m {model}": "--data",
    "doctor --quality --shape tiny -d {data}": "--model",
    "doctor --quality -m {model} -d {data}x": "cannot be read",
    "doctor --quality -m {model} -d {data} --profile {tmp}/no/p.json": "--profile FILE",
    f"{GATE} --threshold 1": "threshold must be between 0 and 1",
    f"{GATE} --selector best": "'best'",
    f"{GATE} --ratio 2": "0..1",
    f"{GATE} --template none-such": "none-such",
    f"{EVALUATE} --scorer bleu": "there is no scorer 'bleu'",
    f"{EVALUATE} --methods blnd": "there is no method 'blnd'",
    f"{EVALUATE} --ratio much": "--ratio much: expected a number",
    f"{EVALUATE} --check-layers 1;2": "--check-layers 1;2: expected a number",
    f"{EVALUATE} --check-layers 9": "check layer 9 does not exist",
    f"{EVALUATE} --selector hkvdd": "no selector is called 'hkvdd'",
    f"{EVALUATE} --selector query:hops=9": "hops must be a whole number, 0 to 4 (0: only the question), got 9",
    f"{EVALUATE} --selector hkvd:foo=1": "there is no setting 'foo' here; settings are measure",
    f"{EVALUATE} --template none": "there is no template [none]; the file has bare, qa, summary",
    f"{EVALUATE} --format musique": "there is no format 'musique'",
    f"{EVALUATE} --chat": "the tokenizer has no chat template",
    f"{EVALUATE} --json-file {{tmp}}/no/x.json": "there is no folder",
    f"{EVALUATE} --out {{file}}": "is a file; name a folder",
    f"{EVALUATE} --out {{file}}/in/it": "is a file; name a folder",
    "evaluate -d {data}": "give --model FOLDER, or --model nano",
    "bench ttft": "model",
    f"{TTFT} --methods full,foo": "there is no method 'foo' here; choose from full, prefix, reuse, blend, miss",
    f"{TTFT} --store redis": "there is no store 'redis' here; choose from memory, disk",
    f"{TTFT} --json-file {{tmp}}/no/r.json": "no folder",
    f"{TTFT} --json-file {{tmp}}": "it is a folder",
    f"{TTFT} --chunks 100": "51264 tokens",
    "demo --ratio 2": "0..1",
    "demo --plot {tmp}/x.txt": "'x.txt'",
    "demo --plot {tmp}/no/x.png": "no folder",
    "demo --keep {tmp}": "exists already",
    "demo --keep {data}/kept": "the folder cannot be made: Not a directory",
}
"""What the line says of some of them."""


def _lines(table: str) -> dict[str, list[str]]:
    """By kind; a row has how they begin, ``...`` if they have nothing in common, and how they go on."""
    found = dict[str, list[str]]()
    for row in table.strip().splitlines():
        if row.startswith("["):
            kind = found.setdefault(row[1:-1], [])
            continue
        begin, _, ends = row.partition(": ") if not row.startswith("... ") else ("", "", row[4:])
        begin = globals()[begin] if begin.isupper() else begin
        kind += [f"{begin} {end}".lstrip() for end in ends.split(" | ")]
    return found


WRONG = _lines("""
[unknown]
... nonsense | --nonsense | profile | keys nonsense | bench nonsense | doctor --model {model} extra
... evaluate --nonsense 3 | store nonsense | ask --nonsense | demo extra | bench ttft -z
[renamed]
... evaluate --rows 3 | evaluate --arm full | evaluate --check-layer 1 | doctor --rows 3 | warm --rows 3
... calibrate --rounds 3 | evaluate --json out.json | ask --check-layer 1 | plan --machine x.json
... bench ttft --json out.json
[missing]
... ask | warm -m {model} -s {tmp}/s | warm -s {tmp}/s -d {data} | calibrate -m {model} | evaluate | serve
... keys add | keys rm | sync | sync -m {model} -s {tmp}/s | plan -m {model} | store pin {store}
ask: -m {model} | -m
store: ls | prune {store}
[numbers]
ASK: -r nan | -r -0.1 | -r much | -r 0.1 -r 0.2 | -r 0.2,0.1 | -n 1e3 | -n 99999999999999999999 | --temperature -1
ASK: --temperature nan | --temperature inf | --seed -1 | --seed 99999999999999999999999 | --row -1
ASK: -d {data} --row 9 | --check-layers 1;2 | --check-layers 2,1 | --check-layers -1 | --block-size 0
ASK: --selector threshold:threshold=nan | --selector threshold:threshold=Infinity
WARM: --limit 0 | --batch-tokens 0 | --block-size -5
CALIBRATE: --runs 0 | --length 0 | --length 99999999999
PLAN: --stored-tokens 0 | --context 1 | --ratio 2
PLAN: --stored-tokens nan | --device nvme:nan:1 | --device nvme:inf:1 | --device nvme
EVALUATE: --limit 0 | --top-k 0 | --chunk-tokens 0 | --ratio 7 | --check-layers x | --seed -3
GATE: --threshold nan | --confidence 2 | --ratio 3 | --max-tokens 0
SERVE: --active 0 | --waiting -1 | --chunk-tokens 0 | --timeout 0 | --timeout nan | --drain -1
SERVE: --tool-call-parser gpt | --max-prompt-tokens 0 | --max-tokens 0 | --store-quota much | --pin-quota -1
demo: --ratio nan | --questions 0 | --questions 13 | --seed x | --seed 10
TTFT: --threads 0 | --threads x | --chunks 0 | --chunks 99999999999 | --chunk-tokens -1 | --question-tokens 0
TTFT: --ratio nan | --runs 0 | --seed -1
serve -m {model}: --shadow -0.1 | --shadow 0.1 --shadow-floor 0.99999 | --shadow 0.1 --shadow-floor 0.9999999
store: prune {store} --max-bytes -1 | prune {store} --max-bytes 1e9
... plan -m {model} --prefill-s -inf
[names]
ASK: --measure q | --codec zip | --anchor there | --device meta | -p @{tmp}/ﬀ
WARM: --engine tgi | --codec int3 | --frame nothing
CALIBRATE: --codec none
PLAN: --codec none
EVALUATE: --anchor there
GATE: --format musique
SERVE: --anchor system | --selector best
... doctor --model nano --dtype int8 | bench ttft --shape round | keys add 😀 --file {tmp}/no/keys.json
... store unpin {store} ünbekannt | store pin {store} 😀
TTFT: --arms full,blnd | --store tape
[files]
ask: -m {tmp}/none -s memory -q ? | -m {tmp} -s memory -q ? | -m {file} -s memory -q ?
ASK: -d {tmp}/none.json | -d {broken} | -p @{tmp} | --profile {tmp}/none.json | --profile {broken}
ASK: --profile {tmp} | --cost-model {tmp}/none.json | --cost-model {broken} | --cost-model {tmp}
ASK: --cost-model {list}
warm -m {model} -s {tmp}/s -d: {broken} | {tmp}
plan: -m {model} --cost-model {list} | -m {tmp} --prefill-s 1
... calibrate -m {model} -s {tmp}/s --out {tmp} | calibrate -m {model} -s {tmp}/s --out {tmp}/no/c.json
... doctor -m {tmp}/none | keys add known --file {keys} | bench ttft --model {tmp}
evaluate -m: {model} -d {broken} | {model} -d {tmp} | {tmp}/none -d {data}
EVALUATE: --answers both | --templates {broken} | --templates {tmp}/none.toml | --json-file {tmp}
SERVE: --keys {tmp}/none.json | --keys {broken} | --keys {tmp}
keys ls --file: {tmp}/nope.json | {broken} | {list}
keys rm: x --file {tmp}/nope.json | nobody --file {keys}
TTFT: --data {tmp}/none.txt
sync -m {model} -s {tmp}/s --source: {tmp}/none | {broken}
[stores]
store ls: {tmp}/none | {file} | {tmp} | s3:// | redis:// | redis://127.0.0.1:1?timeout=0.2
store ls: redis://127.0.0.1:notaport | redis://127.0.0.1:99999 | s3://b?endpoint=http://127.0.0.1:1&timeout=0.2
store ls: file://{store}?max_bytes=much | file://{store}?speed=3 | {store} {tmp}
store: verify memory:// | rm {store} 00ff
store stat: file://host/x | file:// | gs://bucket
... sync -m {model} -s memory --source {tmp} | warm -m {model} -s http://x -d {data}
... calibrate -m {model} -s tape://x --out {tmp}/c.json | store pin {store} x --all
ask -m {model} -q Why? -s: ftp://x | memory://x | memory://?max_bytes=-1 | memory://?ttl=soon
ask -m {model} -q Why? -s: memory://?evict=random | file://{tmp}/a?locks=maybe
ask -m {model} -q Why? -s: redis://127.0.0.1:6379?timeout=nan | kvfoo?max_bytes=1MiB | memory,./kvx
ask -m {model} -q Why? -s: memory,memory | memory, | , | Memory | file: | mem: | ~nobody-of-this-name/x
EVALUATE: -s tape://x
SERVE: -s tape://x
[network]
serve -m {model} --port: 99999 | -1 | http | {busy}
SERVE: --host 300.1.1.1 | --host 192.0.2.1 | --host no..host | --host [::1
[contradictions]
ASK: --profile {file} --ratio 0.2 | --selector head -r 0.5,0.2 --check-layers 0,1 | -r 0.2,0.5 --check-layers 0,1
... doctor -m {model} --shape tiny | bench ttft --model {model} --shape tiny | serve -m {model} --shadow-floor 0.9
PLAN: --cost-model {file}
""")

WRONG_LAB = _lines("""
[unknown]
... nonsense | train --nonsense | core --out x | vllm nonsense
[renamed]
... inspect --max-tokens 9 | match --json=out.json
[missing]
... train | paper | evaluate | real | load | controller | evict | sync | agent | peers
... inspect -m {model} -q Why? | vllm replay
paper: -m {model} | -d {data}
[numbers]
INSPECT: --max-prompt-tokens 0
load --shape tiny: --threads 0 | --ratio 1.01
controller: --shape tiny --chunks 0 | --shape tiny --runs 0
... core --threads 0 | suite nano --suite-seed -1 | cuda --dry-run --minutes 0
... routing --servers 1 | vllm replay --trace {tmp} --rate 0 | vllm faults --tried 0
... peers --data {tmp} --chunks 0
match: --runs 0 | --stored 0 | --stored 1 | --stored 99999999 --chunk-tokens 4096
store: --blocks 0 | --blocks -7
evict --trace {tmp}: --size 2 | --size nan
train --out {tmp}/x: --threads -1 | --seed -1
codecs: --suite-seed 9 | --limit 0
real: --data {data} --rows 0
orders: --data {data} --answer-tokens 0
edits: --data {data} --turns 4 | --data {data} --steps 99
serve: --clients 0 | --shadow 1.5
vllm ttft: --batched-tokens 0 | --dtype int8
vllm timeline: --batched-tokens 0 | --runs 0
agent: --data {tmp} --turns 2 | --data {tmp} --reorder 1.5
[names]
... suite micro | suite nano --part swap | load --shape tiny --kv-shape round | cuda --dry-run --part round
edits: --data {data} --scene forgetting | --data {data} --way head
real: --data {data} --part both | --data {data} --way bos
[files]
INSPECT: --out {file}
... sync --data {tmp}/none | core --shape tiny --json-file {tmp}
... match --json-file {tmp} | store --folder {tmp}/none | load --shape tiny --folder {file}
... cuda --dry-run --folder {file} | evict --trace {tmp}/none | evict --trace {tmp} --plot {tmp}/x.txt
... vllm ttft --model {tmp}/none | vllm timeline --model {tmp}/none
... codecs --json-file {tmp} | vllm replay --trace {tmp}/none
agent: --shape tiny --data {tmp}/none | --shape tiny --data {broken}
agent: --shape tiny --data {data} --model {tmp}/none
real: --data {tmp}/none | --data {broken} | --data {data} --model {tmp}/none
orders: --data {tmp}/none
edits: --data {tmp}/none | --data {data} --model {tmp}/none
adapt: --data {tmp}/none | --data {data} --rank 0
peers: --shape tiny --data {tmp}/none | --shape tiny --data {broken} | --model {tmp}/none --data {data}
serve: --model {tmp}/none | --trace {tmp}
vllm faults: --only nothing | --json-file {tmp}
[stores]
INSPECT: -s memory://x
[contradictions]
suite nano: -d {data} | --methods full
paper: -m {model} -d {data} --ratio 0.1,0.2 | -m {model} -d {data} -d {data}
serve: --model {model} --shape tiny | --shape tiny --plot x.png
... routing --model {model} --shape tiny | vllm latency --model {model} --shape tiny
""")
"""Of `python -m lab`."""


JUNK = ["", "0", "-1", "nan", "inf", "-inf", "1e400", "99999999999999999999", "x", "é", "😀", "\udcff", "\x1b[2J"]
JUNK += ["[/b]", "/", ".", "~", "@", ",", "1,", "a=b", "s3://", "file:///nonexistent/x", "--", "-", "None", "{}", "%s"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    root = tmp_path_factory.mktemp("wrong")
    build_tiny(root / "tiny-llama", [PASSAGE], SHAPE)
    made = {"model": root / "tiny-llama", "store": root / "store"}
    made |= {name: root / f"{name}.json" for name in ("data", "keys", "file", "broken", "list", "surrogate")}
    made["data"].write_text(f'[{{"ctxs": [{{"title": "", "text": "{PASSAGE}"}}], "question": "When?"}}]')
    made |= {name: root / name for name in ("nothing", "pipe")}
    made["nothing"].touch()
    os.mkfifo(made["pipe"])
    made["file"].write_text("text")
    made["broken"].write_text('{"format": 1, "keys": [')
    made["list"].write_text("[1]")
    made["surrogate"].write_text('[{"question": "Why?", "passages": [{"text": "a"}, {"text": "b \\ud800"}]}]')
    add_key(made["keys"], "known")
    open_store(made["store"]).close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {name: str(path) for name, path in made.items()} | {"busy": str(taken.getsockname()[1])}


def filled(arguments: list[str], places: dict[str, str], tmp: Path) -> list[str]:
    names = places | {"tmp": str(tmp)}
    return [re.sub(r"\{(\w+)\}", lambda found: names[found[1]], argument) for argument in arguments]


def check(code: int, out: str, err: str) -> None:
    assert code == 2, (out, err)
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ") and len(lines[0]) > 20
    assert "Traceback" not in err


def commands_of(app: typer.Typer) -> list[tuple[tuple[str, ...], list[str]]]:
    """Every command by its names, and its options that take a value."""
    found = []

    def visit(command: object, names: tuple[str, ...]) -> None:
        for name, below in getattr(command, "commands", {}).items():
            visit(below, (*names, name))
        if not hasattr(command, "commands"):
            takes = [p.opts[0] for p in command.params if p.opts[0].startswith("--") and not p.is_flag]  # type: ignore[attr-defined]
            found.append((names, takes))

    visit(typer.main.get_command(app), ())
    return found


def check_junk(
    app: typer.Typer, main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    """Junk in any option is no traceback. The command does not get as far as its work: an option that does not exist
    follows."""
    names, options = data.draw(st.sampled_from(commands_of(app)))
    value = data.draw(st.one_of(st.sampled_from(JUNK), st.text(max_size=20)))
    option = data.draw(st.sampled_from([*options, "--nonsense"]))
    with pytest.raises(SystemExit) as left:
        main([*names, f"{option}={value}", "--no-such-option"])
    captured = capsys.readouterr()
    check(int(left.value.code or 0), captured.out, captured.err)
