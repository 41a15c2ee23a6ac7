# SPDX-License-Identifier: Apache-2.0
"""engine_run.py for a GPU: sleeps (level 1) and wakes between scenarios if the engine can, and adds
"preemptions" to the result if the engine counts them."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "backend"))

import engine_run


def main():
    run, used = engine_run.run_scenario, []

    def run_and_keep(llm, name, requests):
        if used and llm.llm_engine.model_config.enable_sleep_mode:
            llm.sleep(level=1)
            llm.wake_up()
        used.append(llm)
        return run(llm, name, requests)

    engine_run.run_scenario = run_and_keep
    engine_run.main()
    if used[0].llm_engine.log_stats:
        counted = {m.name: getattr(m, "value", None) for m in used[0].get_metrics()}
        path = Path(sys.argv[2])
        result = json.loads(path.read_text())
        path.write_text(json.dumps(result | {"preemptions": counted["vllm:num_preemptions"]}))


if __name__ == "__main__":
    main()
