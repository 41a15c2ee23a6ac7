# SPDX-License-Identifier: Apache-2.0
"""engine_run.py for a GPU: sleeps and wakes between scenarios if the engine can, by level 1 or that
of SLEEP_LEVEL: 2 forgets the weights."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "backend"))

import engine_run


def sleep_and_wake(llm, level):
    llm.sleep(level=level)
    if level == 1:
        llm.wake_up()
        return
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])


def main():
    run, names = engine_run.run_scenario, []

    def sleep_and_run(llm, name, requests):
        if names and llm.llm_engine.model_config.enable_sleep_mode:
            sleep_and_wake(llm, int(os.environ.get("SLEEP_LEVEL", 1)))
        names.append(name)
        return run(llm, name, requests)

    engine_run.run_scenario = sleep_and_run
    engine_run.main()


if __name__ == "__main__":
    main()
