"""SGLang 0.5.23 on a CPU, unpatched: `server.py` is run in place of `sglang.launch_server`."""
