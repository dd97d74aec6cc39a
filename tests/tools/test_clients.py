"""The programs of docs/programs that use exported files: a server, node, a browser and C++."""

from __future__ import annotations

import csv
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from PIL import Image

from longseq.backbones.tokens import TokenBackbone
from longseq.tasks import predict
from longseq.tools import export
from longseq.tools.export import export_language_model

pytestmark = pytest.mark.clients
PROGRAMS = Path(__file__).parents[2] / "docs" / "programs"
PACKAGES = Path(os.environ.get("NODE_MODULES", "node_modules"))  # those that docs/pages/clients.md lists
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def needs_packages(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if not (PACKAGES / name).is_dir()]
    return pytest.mark.skipif(bool(missing), reason=f"{PACKAGES} lacks {', '.join(missing)}")


@pytest.fixture(scope="module")
def picture_model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str, float]:
    """A folder with model.onnx, model.pt and cat.png of the model's size, and its likeliest class with probability."""
    folder = tmp_path_factory.mktemp("clients")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
    Image.fromarray(pixels).save(folder / "cat.png")
    shown = f"checkpoint={checkpoint}"
    with initialize_config_module("longseq.conf", version_base="1.3"):
        for name in ("model.onnx", "model.pt"):
            words = [shown, f"output={folder / name}", "preprocess=true", "softmax=true", "latency=false"]
            export.run(compose("export", [*words, "batch_sizes=[1]"]))
        words = [shown, f"input={folder / 'cat.png'}", f"output={folder / 'cat.csv'}", "device=cpu"]
        predict.run(compose("predict", words))
    with (folder / "cat.csv").open(newline="") as lines:
        (row,) = csv.DictReader(lines)
    return folder, folder / "model.onnx", row["class_1"], float(row["probability_1"])


def check(answer: str, model: tuple[Path, Path, str, float]) -> None:
    *_, name, probability = answer.split()
    assert name == model[2]
    assert float(probability) == pytest.approx(model[3], abs=2e-3)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Sends the picture that ends a page so late that the page's scripts are done: browsers wait for it."""

    def do_GET(self) -> None:
        if self.path == "/late.png":
            time.sleep(8)
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of a server of `tmp_path`, in which the pages are."""
    for page in PROGRAMS.glob("*.html"):
        (tmp_path / page.name).write_text(page.read_text(encoding="utf-8") + '<img src="late.png">', encoding="utf-8")
    (tmp_path / "node_modules").symlink_to(PACKAGES.absolute())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def browse(address: str) -> str:
    """The page as it is after its scripts have run."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def test_server(picture_model: tuple[Path, Path, str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    testing = pytest.importorskip("fastapi.testclient")
    folder, model, name, probability = picture_model
    monkeypatch.setenv("MODEL", str(model))
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.delitem(sys.modules, "serve", raising=False)
    import serve

    with (folder / "cat.png").open("rb") as file:
        answer = testing.TestClient(serve.app).post("/classify", files={"picture": file}).json()
    assert next(iter(answer)) == name
    assert answer[name] == pytest.approx(probability, abs=1e-4)


@needs_packages("onnxruntime-node", "sharp")
def test_node(picture_model: tuple[Path, Path, str, float], tmp_path: Path) -> None:
    folder, model, *_ = picture_model
    shutil.copy(PROGRAMS / "classify.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(PACKAGES.absolute())
    command = ["node", str(tmp_path / "classify.mjs"), str(model), str(folder / "cat.png")]
    check(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout, picture_model)


@needs_packages("onnxruntime-web")
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium")
def test_page_that_classifies(picture_model: tuple[Path, Path, str, float], served: str, tmp_path: Path) -> None:
    for file in picture_model[0].iterdir():
        shutil.copy(file, tmp_path)
    page = browse(f"{served}/classify.html?model=model.onnx&picture=cat.png")
    check(page.split('<p id="answer">')[1].split("</p>")[0], picture_model)


@needs_packages("onnxruntime-web")
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium")
def test_page_that_continues(served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = TokenBackbone(vocab_size=257, d_model=16, depth=1, mixer="deltanet")
    data = {"tokenizer": {"kind": "bytes"}, "separator": 256, "start": None, "ends": [256]}
    export_language_model(model, tmp_path / "step.onnx", data=data, batch_sizes=(1,))
    monkeypatch.syspath_prepend(str(PROGRAMS))
    from continue_text import continue_text

    page = browse(f"{served}/continue.html?model=step.onnx&text=la+la")
    written = page.split("<textarea")[1].split(">")[1].split("</textarea")[0]
    assert written == "la la" + continue_text(str(tmp_path / "step.onnx"), "la la", max_new_tokens=20)


def build_and_run(program: str, model: str, words: list[str], folder: Path, tmp_path: Path) -> str:
    """What a C++ program prints for the picture; `words` tell g++ where it finds the library."""
    Image.open(folder / "cat.png").save(tmp_path / "cat.ppm")
    names = json.loads((folder / f"{model}.json").read_text())["class_names"]
    (tmp_path / "names.txt").write_text("\n".join(names))
    command = ["g++", "-std=c++20", "-O0", str(PROGRAMS / f"{program}.cpp"), "-o", str(tmp_path / program), *words]
    subprocess.run(command, check=True, timeout=400)
    run = [tmp_path / program, folder / model, tmp_path / "names.txt", tmp_path / "cat.ppm"]
    return subprocess.run(run, capture_output=True, text=True, check=True, timeout=100).stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_libtorch(picture_model: tuple[Path, Path, str, float], tmp_path: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    words = [*(f"-I{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths())]
    words += [*(f"-Wl,-rpath,{path}" for path in library_paths()), "-ltorch", "-ltorch_cpu", "-lc10"]
    check(build_and_run("classify", "model.pt", words, picture_model[0], tmp_path), picture_model)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_onnxruntime_in_cpp(picture_model: tuple[Path, Path, str, float], tmp_path: Path) -> None:
    headers = Path(os.environ.get("ONNXRUNTIME_HEADERS", "/usr/include/onnxruntime"))  # no wheel has them
    if not (headers / "onnxruntime_cxx_api.h").is_file():
        pytest.skip("there are no headers of onnxruntime (ONNXRUNTIME_HEADERS)")
    onnxruntime = pytest.importorskip("onnxruntime")
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))
    words = [f"-I{headers}", str(library), f"-Wl,-rpath,{library.parent}"]
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)  # the name that the program looks for
    words.append(f"-Wl,-rpath,{tmp_path}")
    check(build_and_run("classify_onnx", "model.onnx", words, picture_model[0], tmp_path), picture_model)
