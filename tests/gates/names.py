"""Rules for names."""

import re

# Files that tools look for under these names.
FIXED_FILES = {
    "Makefile",
    "CMakeLists.txt",
    "README.md",
    "CONTRIBUTING.md",
    "_C.pyi",
    "CHANGELOG.md",
    "SECURITY.md",
    "CITATION.cff",
    "LICENSE",
    "MANIFEST.in",
    "compute-sanitizer",
    "nvidia-cuda-mps-control",
    "nvidia-smi",
}
FILE = re.compile(r"_{0,2}[a-z][a-z0-9]*(_[a-z0-9]+)*(__)?(\.[a-z0-9_]+)*$")
LOOSE_FOLDERS = {"docs", "cmake", ".ci", ".github"}  # dashes are usual in these

VAGUE = re.compile(r"\w*?(Impl|Manager|Helper|Helpers|Util|Utils|Base)$")
CAMEL = re.compile(r"[A-Z][A-Za-z0-9]*$")
SNAKE = re.compile(r"~?[a-z][a-z0-9_]*_?$")

# Every macro, and the files that may define it. A new macro needs a line here, with its reason.
MACROS = {
    "NVX_CHECK": ("csrc/base/error.h",),
    "NVX_TRY": ("csrc/base/error.h",),
    "NVX_LOG": ("csrc/base/log.h",),
    "NVX_FUNCTION": ("csrc/base/library.h",),  # names a library's function once: as pointer and as text
    "NVX_UCX": ("csrc/net/ucx/ucx_library.h",),  # the same, with the type from UCX's header
    "NVX_HD": ("csrc/kernel/exec.h", "csrc/kernel/reduce/float_bits.h"),
    "NVX_RECORD_COMMS": ("csrc/torch/core/recorded.h",),  # torch's macro for it, whose name and arguments changed
    "NVX_NOINLINE": ("csrc/kernel/exec.h",),  # CUDA spells noinline in its own way
    "NVX_COLD": ("csrc/kernel/exec.h",),
    "NVX_UNROLL": ("csrc/kernel/exec.h",),  # pragmas that only CUDA has
    "NVX_NO_UNROLL": ("csrc/kernel/exec.h",),
    # Every level compiles this code for itself, so it must be inlined.
    "NVX_RULE": ("csrc/kernel/reduce/float_bits.h",),
    "NVX_LEVEL": ("csrc/kernel/reduce/float_bits.h",),  # the default if the build does not define it
    "NVX_INDEPENDENT": ("csrc/kernel/reduce/levels/level.cc",),  # one pragma, two compilers
    "NVX_SCALAR": ("csrc/kernel/reduce/levels/level.cc",),
    "NVX_NAME": ("csrc/kernel/reduce/levels/level.cc",),  # the level's name as text
    "NVX_NAME_": ("csrc/kernel/reduce/levels/level.cc",),
}
ANNOTATIONS = "csrc/base/mutex.h"  # names clang's thread-safety attributes
# Functions that another library calls by these names.
FOREIGN_FUNCTIONS = {
    "LLVMFuzzerTestOneInput",
    "LLVMFuzzerInitialize",
    "LLVMFuzzerCustomMutator",
    "__lsan_is_turned_off",
    "SetUp",
    "TearDown",
    "SetUpTestSuite",
    "TearDownTestSuite",
    "PrintTo",
    "TestBody",
}
# Names of CUDA's runtime, in the code that simulates it for tests.
SIMULATED_CUDA = "tests/gpu/simulated/"
CUDA_NAME = re.compile(r"(cuda[A-Z][A-Za-z]+|CU[A-Za-z]+_st)$")
SEEDS = "tests/fuzz/seeds"  # libFuzzer names them by their hash
OVERRIDES = ("csrc/torch/", "tests/torch/fake_device/", "tests/torch/fake_nccl/")
GTEST = {
    "TEST",
    "TEST_F",
    "TEST_P",
    "TYPED_TEST",
    "INSTANTIATE_TEST_SUITE_P",
    "PYBIND11_MODULE",
    "TORCH_LIBRARY",
    "TORCH_LIBRARY_IMPL",
    "TYPED_TEST_SUITE",
}


def file_breaches(path):
    name = path.name
    if path.is_relative_to(SEEDS) or path.parts[0] in LOOSE_FOLDERS:
        return []
    if name in FIXED_FILES or name.startswith(".") or FILE.match(name):
        return []
    return [f"{path}: files are snake_case"]


def tag_breaches(tag):
    name, kind, path = tag["name"], tag["kind"], tag["path"]
    where = f"{path}:{tag['line']}: "
    if name.startswith("__anon") or re.search(
        rf"\b(?:struct|union|enum) \w+ {re.escape(name)}\b", tag.get("pattern", "")
    ):
        return []  # unnamed, or a variable whose type is written with its tag
    if kind == "macro":
        return _macro(name, path, where)
    if path.startswith(SIMULATED_CUDA) and CUDA_NAME.match(name):
        return []
    if kind in ("class", "struct", "union", "enum", "typedef"):
        if VAGUE.match(name):
            return [where + f"{name} says nothing: no Impl, Manager, Helper, Utils"]
        # A name that the standard library's concepts require: value_type.
        lower_case_alias = kind == "typedef" and SNAKE.match(name)
        return [] if CAMEL.match(name) or lower_case_alias else [where + f"{name}: types are CamelCase"]
    if kind == "function":
        return _function(tag, where)
    return []


def _macro(name, path, where):
    if path == ANNOTATIONS or path in MACROS.get(name, ()):
        return []
    if path.startswith("tests/"):
        return (
            []
            if re.match(r"(ASSERT|EXPECT)_[A-Z_]+$", name)
            else [where + f"macro {name}: tests define ASSERT_ and EXPECT_ only"]
        )
    return [where + f"macro {name} is not on the list of macros"]


def _function(tag, where):
    name, scope = tag["name"], tag.get("scope", "")
    constructor = name.lstrip("~") == scope.split("::")[-1]
    if constructor or name in GTEST or name in FOREIGN_FUNCTIONS or name.startswith("operator"):
        return []
    if tag["path"].startswith(OVERRIDES):  # overrides keep torch's names
        return [] if re.match(r"~?_?[a-z]\w*$", name) else [where + f"{name}(): functions begin small"]
    return [] if SNAKE.match(name) else [where + f"{name}(): functions are snake_case"]


FILE_EXAMPLES = (
    ("csrc/base/error.cc", False),
    ("csrc/base/Error.cc", True),
    ("csrc/torch/nccl-delegate.cc", True),
    ("python/nvx/__init__.py", False),
    ("tests/gates/run", False),
    ("README.md", False),
)


def _tag(name, kind, path="csrc/base/x.h", scope=""):
    return {"name": name, "kind": kind, "path": path, "line": 1, "scope": scope}


TAG_EXAMPLES = (
    (_tag("GroupImpl", "class"), True),
    (_tag("GroupManager", "struct"), True),
    (_tag("StoreUtils", "class"), True),
    (_tag("Group", "class"), False),
    (_tag("group_t", "class"), True),
    (_tag("value_type", "typedef"), False),
    (_tag("NVX_CHECK", "macro", "csrc/base/error.h"), False),
    (_tag("NVX_CHECK", "macro", "csrc/base/log.h"), True),
    (_tag("MIN", "macro"), True),
    (_tag("GUARDED_BY", "macro", "csrc/base/mutex.h"), False),
    (_tag("allReduce", "function"), True),
    (_tag("all_reduce", "function"), False),
    (_tag("Group", "function", scope="nvx::Group"), False),
    (_tag("allreduce_coalesced", "function", "csrc/torch/backend.cc"), False),
    (_tag("monitoredBarrier", "function", "csrc/torch/backend.cc"), False),
    (_tag("recordDataPtrOnStream", "function", "tests/torch/fake_device/guard.cc"), False),
    (_tag("TEST", "function", "tests/base/x_test.cc"), False),
    (_tag("cudaMalloc", "function", "tests/gpu/simulated/x.cc"), False),
    (_tag("cudaMalloc", "function", "tests/gpu/x.cc"), True),
    (_tag("simulateAll", "function", "tests/gpu/simulated/x.cc"), True),
)
