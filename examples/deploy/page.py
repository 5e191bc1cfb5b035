"""One HTML page with a policy in it, which acts in the browser without a network:

    cebm export runs/demo --out policy.onnx
    python examples/deploy/page.py runs/demo policy.onnx page.html

onnxruntime-web (MIT licence) is fetched by npm, once, into ~/.cache/cebm, and put into the page: 4 MB, too large for a
repository.
"""

import base64
import gzip
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import cebm

RUNTIME = "onnxruntime-web@1.30.0"
CACHE = Path.home() / ".cache" / "cebm"


def fetched(cache: Path = CACHE) -> tuple[bytes, bytes]:
    """The runtime's module and its WebAssembly; npm checks what it loads."""
    archive = cache / f"{RUNTIME.replace('@', '-')}.tgz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", RUNTIME, "--silent", "--pack-destination", str(cache)], check=True)
    with tarfile.open(archive) as files:
        names = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
        module, wasm = (files.extractfile(f"package/dist/{name}").read() for name in names)
    return module, wasm


def page(policy: cebm.EnergyPolicy, model: Path, cache: Path = CACHE) -> str:
    """The page for an exported policy; `policy`, from which it was exported, tells what observations look like."""
    contract = cebm.load_exported(model).contract
    if contract.dtypes != ("float32", "float32", "float32"):
        raise ValueError(f"the page gives float32 numbers, {model} takes {', '.join(contract.dtypes)}")
    about = {
        "obs": contract.history * contract.frame,
        "normal": contract.count("normal"),
        "uniform": contract.count("uniform"),
        "middle": policy.units.middle.tolist(),
        "scale": policy.obs_box.scale.tolist() if policy.units.conversion.plain else [1.0] * len(policy.units.middle),
    }
    module, wasm = fetched(cache)
    parts = {"contract": json.dumps(about)}
    for name, content in (("runtime", module), ("wasm", wasm), ("model", model.read_bytes())):
        parts[name] = base64.b64encode(gzip.compress(content)).decode()
    text = Path(__file__).with_name("page.html").read_text()
    for name, content in parts.items():
        text = text.replace(f"{{{{{name}}}}}", content)
    return text


if __name__ == "__main__":
    run, model, out = map(Path, sys.argv[1:])
    out.write_text(page(cebm.load(run), model))
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
