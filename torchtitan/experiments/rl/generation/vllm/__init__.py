"""vLLM as the library's engine. An engine is a folder, or a file, that implements ``generation/engine.py``. Here:

* ``engine.py``, in the generator's process: the config, and the engine that it builds. It translates requests and results.
* ``worker.py``, in each of vLLM's worker processes: copies a snapshot into the model, and says what the model then holds.
* ``compat/vllm.py`` has all that is private of vLLM.
"""
