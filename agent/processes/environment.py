"""Environment of the workers: the variables they are known to need, and those the operator names.

Jobs run code and print what they like, so a secret that happens to be in the environment of an
agent, such as one of another program's, must not reach them. Must not know where the values are
from.
"""

import re
from collections.abc import Iterable, Mapping

#: Names, and beginnings of names that end with `*`.
PASSED = (
    # the process
    *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*", "XDG_*"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "GLIBC_TUNABLES", "PYTHON*", "VIRTUAL_ENV"),
    # threads and devices
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*", "ONEDNN_*"),
    *("DNNL_*", "ATEN_CPU_CAPABILITY", "CUBLASLT_*", "NVSHMEM_*"),
    *("CUDA_*", "CUBLAS_*", "CUDNN_*", "NVIDIA_*", "TORCH*", "PYTORCH_*", "TRITON_*"),
    # compilers of kernels
    *("CC", "CXX", "CPATH", "LIBRARY_PATH"),
    # the network between workers
    *("NCCL_*", "UCX_*", "FI_*", "OFI_*", "IBV_*", "RES_OPTIONS", "LOCALDOMAIN"),
    *("RDMAV_*", "UCC_*"),
    # models and tokenizers; not HF_TOKEN, since nothing is fetched
    *("HF_HOME", "HF_HUB_*", "HF_DATASETS_*", "TRANSFORMERS_*", "TOKENIZERS_*", "RAYON_*"),
    # checkpoints at a URL
    *("FSSPEC_*", "AWS_*", "GOOGLE_*", "GCSFS_*", "AZURE_*", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("STORAGE_EMULATOR_HOST", "CLOUDSDK_CONFIG"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy", "all_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
)
_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")


def read_patterns(texts: Iterable[str]) -> tuple[str, ...]:
    """Read the names in texts like `NAME,PREFIX_*`. Raises ValueError."""
    patterns = [part.strip() for text in texts for part in text.split(",")]
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            raise ValueError(
                f"--pass-env {pattern}: give names of variables, or beginnings of names with * at "
                "the end, such as MY_SETTING,MY_LIBRARY_*"
            )
    return tuple(patterns)


def passed_on(environment: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Return the part of `environment` that workers get. `more`: patterns beside those of all
    agents."""
    patterns = (*PASSED, *more)
    names = {pattern for pattern in patterns if not pattern.endswith("*")}
    beginnings = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
    return {
        name: value
        for name, value in environment.items()
        if name in names or name.startswith(beginnings)
    }
