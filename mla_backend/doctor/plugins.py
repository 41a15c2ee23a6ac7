# SPDX-License-Identifier: Apache-2.0
"""Checks of what vLLM sees of this plugin in a fresh process."""

from mla_backend import envs, plugin
from mla_backend.doctor.facts import Facts
from mla_backend.doctor.report import Result

OWN_NAMES = (plugin.GENERAL_PLUGIN, plugin.PLATFORM_PLUGIN)
_REINSTALL = "in this project's folder: pip install --force-reinstall --no-deps . (or -e .)"


def entry_points(facts: Facts) -> Result:
    if facts.probe_failure:
        return Result("entry points", "fail", facts.probe_failure, "mend the import it names")
    seen = {entry["name"]: entry for entry in facts.seen.get("entry_points", [])}
    missing = [name for name in OWN_NAMES if name not in seen]
    if missing:
        found = f"a fresh process does not see {', '.join(missing)}"
        return Result("entry points", "fail", found, _REINSTALL)
    broken = [f"{name}: {seen[name]['error']}" for name in OWN_NAMES if seen[name]["error"]]
    if broken:
        return Result("entry points", "fail", "; ".join(broken), "mend the import it names")
    return Result("entry points", "ok", ", ".join(OWN_NAMES))


def vllm_plugins_filter(facts: Facts) -> Result:
    """VLLM_PLUGINS filters every group of plugins, platforms too."""
    value = facts.environ.get("VLLM_PLUGINS")
    if value is None:
        return Result("VLLM_PLUGINS", "ok", "not set: vLLM loads every plugin")
    needed = (plugin.GENERAL_PLUGIN,) if facts.gpus else OWN_NAMES
    # vLLM takes the names as they stand, with the spaces around them.
    missing = [name for name in needed if name not in value.split(",")]
    if missing:
        found = f"VLLM_PLUGINS={value!r} keeps {', '.join(missing)} from loading"
        named = [name.strip() for name in value.split(",") if name.strip()]
        mend = f"unset it, or VLLM_PLUGINS={','.join(dict.fromkeys([*named, *missing]))}"
        return Result("VLLM_PLUGINS", "fail", found, mend)
    return Result("VLLM_PLUGINS", "ok", f"VLLM_PLUGINS={value!r} names what is needed of ours")


def backend_registered(facts: Facts) -> Result:
    view = facts.seen.get("vllm")
    if view is None:
        found = facts.probe_failure or facts.seen["errors"]["vllm"]
        return Result("backend", "fail", f"vLLM cannot be imported: {found}", "mend that import")
    custom = view["custom"]
    if custom == plugin.BACKEND_CLASS:
        return Result("backend", "ok", f"--attention-backend CUSTOM selects {custom}")
    if custom == plugin.REFUSAL_CLASS:
        found, mend = "this vLLM is refused; CUSTOM answers with the reason", "see vllm above"
    elif custom:
        found = f"--attention-backend CUSTOM selects another plugin's {custom}"
        mend = "uninstall that plugin, or leave it out with VLLM_PLUGINS"
    else:
        found, mend = (
            "--attention-backend CUSTOM selects nothing",
            "see entry points and VLLM_PLUGINS above",
        )
    return Result("backend", "fail", found, mend)


def platform(facts: Facts) -> Result:
    view = facts.seen.get("vllm")
    if view is None:
        return Result("platform", "fail", "unknown: vLLM cannot be imported", "see backend above")
    active = view["platform"]
    if active == plugin.CPU_PLATFORM_CLASS:
        found = (
            "the CPU platform plugin of mla-backend is active. With --attention-backend CUSTOM it "
            "selects our MLA backend, keeps 64-token blocks, chunked prefill and prefix caching, "
            "and routes rotary embedding around vLLM's faulty CPU op. Without CUSTOM it changes "
            "only how vLLM's processes wait for each other, and no longer accepts padding as drafts"
        )
        return Result("platform", "ok", found)
    if "cpu" in active.lower():
        found = f"{active} is active: on a CPU it never selects --attention-backend CUSTOM"
        mend = "unset MLA_BACKEND_CPU_PLATFORM and uninstall other CPU platform plugins"
        if vllm_plugins_filter(facts).status != "ok":
            mend = "see VLLM_PLUGINS above"
        elif facts.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
            mend = "unset VLLM_TARGET_DEVICE: with cpu vLLM asks no plugin for a platform"
        elif "zen" in active.lower():
            mend = "uninstall zentorch, for which vLLM takes a CPU platform of its own"
        return Result("platform", "warn", found, mend)
    return Result("platform", "ok", f"{active} (vLLM's own; this plugin does not touch it)")


def engine(facts: Facts) -> Result:
    """The rest of vLLM, which it imports only to start."""
    if facts.seen.get("vllm") is None:
        return Result("engine", "fail", "unknown: vLLM cannot be imported", "see backend above")
    if error := facts.seen["engine_error"]:
        mend = "mend that import; `pip check` names packages that are missing or do not fit"
        return Result("engine", "fail", f"vLLM's engine cannot be imported: {error}", mend)
    return Result("engine", "ok", "vLLM's engine can be imported")


def settings(facts: Facts) -> Result:
    """Every MLA_BACKEND_* variable parses, and none is misspelt."""
    problems = envs.problems(facts.environ)
    if problems:
        mend = "correct or unset it; the names are in docs/environment.md"
        return Result("settings", "fail", "; ".join(problems), mend)
    ours = (name for name in facts.environ if name in envs.ENV_VARS)
    shown = ", ".join(f"{name}={facts.environ[name]}" for name in ours)
    return Result("settings", "ok", shown or "all MLA_BACKEND_* at their defaults")
