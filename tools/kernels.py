#!/usr/bin/env python3
"""Makes kernels/ptx/*.ptx from kernels/*.cu, or checks that they are what the sources make.

    tools/kernels.py            writes them
    tools/kernels.py --check    compares byte for byte, writes nothing, exits 1 where one differs

Needs no GPU and no CUDA: the compiler is NVRTC, taken from its package (24 MB, fetched once by pip
into target/nvrtc/, known by its hash). Only Python's own library is used besides.

The head of each file says what it was made of: the sources' SHA-256 (the .cu file, then what it
includes, in order), the compiler and its options. The version is old on purpose: its PTX runs with
every driver since 530, and compute_75 is the oldest target that today's compilers still know.
"""

import ctypes
import hashlib
import pathlib
import re
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = ROOT / "target" / "nvrtc"
PACKAGE = "nvidia-cuda-nvrtc-cu12==12.1.105"
PLATFORM = "manylinux1_x86_64"
WHEEL = f"nvidia_cuda_nvrtc_cu12-12.1.105-py3-none-{PLATFORM}.whl"
WHEEL_SHA256 = "339b385f50c309763ca65456ec75e17bbefcbbf2893f462cb8b90584cd27a1c2"
# NVRTC opens its builtins by name: they are loaded before it, so that it finds them.
LIBRARIES = ["libnvrtc-builtins.so.12.1", "libnvrtc.so.12"]
OPTIONS = ["--gpu-architecture=compute_75", "--std=c++17"]


def wheel():
    """The compiler's package, fetched where it is missing."""
    path = CACHE / WHEEL
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        only = ["--no-deps", "--only-binary=:all:", f"--platform={PLATFORM}"]
        subprocess.run(pip + only + [f"--dest={CACHE}", PACKAGE], check=True)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        sys.exit(f"{path}: SHA-256 is {found}, not {WHEEL_SHA256}")
    return path


def load():
    """NVRTC, from the package's unpacked libraries."""
    package = wheel()
    with zipfile.ZipFile(package) as archive:
        for name in LIBRARIES:
            member = f"nvidia/cuda_nvrtc/lib/{name}"
            path = CACHE / name
            if not path.exists() or path.stat().st_size != archive.getinfo(member).file_size:
                path.write_bytes(archive.read(member))
    return [ctypes.CDLL(str(CACHE / name)) for name in LIBRARIES][-1]


def include_names(text):
    """The names of what a source includes, in order."""
    return re.findall(r'^#include "([^"]+)"$', text.decode(), re.MULTILINE)


class Compiler:
    """NVRTC through its C interface."""

    def __init__(self):
        self.library = load()
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            text = self.library.nvrtcGetErrorString(code).decode()
            raise RuntimeError(f"{name}: {text} ({code})")

    def version(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"NVRTC {major.value}.{minor.value} ({PACKAGE})"

    def text(self, program, what):
        """What the program's last compilation left: "PTX" or "ProgramLog"."""
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.value.decode()

    def compile(self, name, source, includes):
        """PTX of `source`; `includes` are pairs of name and text. Ends the run on an error."""
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(includes))(*[text for _, text in includes])
        names = (ctypes.c_char_p * len(includes))(*[name.encode() for name, _ in includes])
        self.call("nvrtcCreateProgram", ctypes.byref(program), source, name.encode(),
                  len(includes), texts, names)
        options = (ctypes.c_char_p * len(OPTIONS))(*[option.encode() for option in OPTIONS])
        code = self.library.nvrtcCompileProgram(program, len(OPTIONS), options)
        log = self.text(program, "ProgramLog").strip()
        # A warning is an error: nobody reads the log of a run that went well.
        if code != 0 or log:
            sys.exit(f"{name}: {log or code}")
        ptx = self.text(program, "PTX")
        self.call("nvrtcDestroyProgram", ctypes.byref(program))
        return ptx


def tidy(ptx):
    """Drops what NVRTC's own text declares and no kernel uses, and trailing spaces."""
    lines = [line.rstrip() for line in ptx.splitlines()]
    lines = [line for line in lines if not re.match(r"\.global .* _ZN\w*2nv6target\w+\b.*;$", line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def make(compiler, path):
    """The text of the PTX file that belongs to the source `path`."""
    source = path.read_bytes()
    includes = [(name, (path.parent / name).read_bytes()) for name in include_names(source)]
    digest = hashlib.sha256(b"".join([source] + [text for _, text in includes])).hexdigest()
    ptx = compiler.compile(path.name, source, includes)
    files = " ".join([path.name] + [name for name, _ in includes])
    head = [
        "Made by tools/kernels.py; do not edit.",
        f"source: {files}",
        f"sha256: {digest}",
        f"compiler: {compiler.version()}",
        f"options: {' '.join(OPTIONS)}",
    ]
    return "".join(f"// {line}\n" for line in head) + "\n" + tidy(ptx)


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    check = sys.argv[1:] == ["--check"]
    compiler = Compiler()
    sources = sorted((ROOT / "kernels").glob("*.cu"))
    wanted = {ROOT / "kernels" / "ptx" / f"{path.stem}.ptx": make(compiler, path)
              for path in sources}
    wrong = [path for path in (ROOT / "kernels" / "ptx").glob("*.ptx") if path not in wanted]
    for path, text in wanted.items():
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"{path.relative_to(ROOT)}: {len(text)} bytes")
        elif not path.exists() or path.read_text() != text:
            wrong.append(path)
    for path in wrong:
        print(f"{path.relative_to(ROOT)}: not what its source makes; run tools/kernels.py")
    if wrong:
        sys.exit(1)
    if check:
        print(f"{len(wanted)} PTX files are what their sources make")


if __name__ == "__main__":
    main()
