# SPDX-License-Identifier: Apache-2.0
"""engine_run.py for a GPU: sleeps (level 1) and wakes between scenarios if the engine can."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "backend"))

import engine_run


def main():
    run, names = engine_run.run_scenario, []

    def sleep_and_run(llm, name, requests):
        if names and llm.llm_engine.model_config.enable_sleep_mode:
            llm.sleep(level=1)
            llm.wake_up()
        names.append(name)
        return run(llm, name, requests)

    engine_run.run_scenario = sleep_and_run
    engine_run.main()


if __name__ == "__main__":
    main()
