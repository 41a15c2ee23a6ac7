# SPDX-License-Identifier: Apache-2.0
"""engine_run.py, with the engine put to sleep (level 1) and woken between its scenarios."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "backend"))

import engine_run
from vllm import LLM


def main():
    run, slept = engine_run.run_scenario, []

    def run_and_sleep(llm: LLM, name, requests):
        if slept:
            llm.sleep(level=1)
            llm.wake_up()
        slept.append(name)
        return run(llm, name, requests)

    engine_run.run_scenario = run_and_sleep
    engine_run.main()


if __name__ == "__main__":
    main()
