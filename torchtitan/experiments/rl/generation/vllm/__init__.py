"""vLLM as the library's engine.

An engine is a folder, or a file, that implements `generation/engine.py`. This one has:

* `engine.py`, in the generator's process: the config, and the engine that it builds.
* `requests.py`, beside it: requests and results as vLLM has them.
* `worker.py`, in each of vLLM's worker processes: copies a version into the model, and digests what
  the model then holds.
* `compat/vllm.py`: every use of vLLM beyond its documented interface.
"""
