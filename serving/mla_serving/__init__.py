# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible FastAPI front end around vLLM's engine. Holds no attention."""
