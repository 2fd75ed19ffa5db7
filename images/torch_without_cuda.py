"""Lets torch's build with CUDA run on CPUs without CUDA's libraries (4 GB): a stub stands in for each of them.

`python torch_without_cuda.py TORCH COMPILER…` reads the ELF files of the package folder TORCH. For each of NVIDIA's
libraries that they need it writes one beside them, with the symbols that they bind from it, in their versions. A stub
returns 100 (`cudaErrorNoDevice`), so `torch.cuda.is_available()` is False, as on a machine without a GPU.

Images for CPUs are built so where the index of torch's build for CPUs cannot be reached.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from elftools.elf.elffile import ELFFile

NVIDIA = ("libcu", "libnccl", "libnvrtc", "libnvshmem")
"""How the names of NVIDIA's libraries begin."""
UNVERSIONED = ("cu", "nccl", "nvrtc", "nvshmem")
"""How the names of their symbols begin, where a library does not version them."""


def wanted(files: Sequence[Path]) -> dict[str, dict[str, set[str]]]:
    """Library of NVIDIA's → version ("" for none) → the symbols that the files bind. Symbols without a version do not
    say whose they are, and are found in any library: they go to the first."""
    bound: dict[str, dict[str, set[str]]] = {}
    loose: set[str] = set()
    defined: set[str] = set()
    for path in files:
        with path.open("rb") as stream:
            elf = ELFFile(stream)
            needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
            bound.update({name: defaultdict(set) for name in needed if name.startswith(NVIDIA) and name not in bound})
            owner = {
                version["vna_other"]: (library.name, version.name)
                for library, versions in elf.get_section_by_name(".gnu.version_r").iter_versions()
                for version in versions
            }
            indices = elf.get_section_by_name(".gnu.version")
            for number, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
                if symbol["st_shndx"] != "SHN_UNDEF":
                    defined.add(symbol.name)
                    continue
                library, version = owner.get(indices.get_symbol(number)["ndx"], ("", ""))
                if library in bound:
                    bound[library][version].add(symbol.name)
                elif not library and symbol.name.startswith(UNVERSIONED):
                    loose.add(symbol.name)
    if bound:
        bound[min(bound)][""] |= loose - defined
    return bound


def write(library: Path, versions: dict[str, set[str]], compiler: Sequence[str]) -> None:
    """Compile the stub. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.c"), Path(folder, "versions")
        symbols = sorted(set().union(*versions.values()))
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in symbols))
        named = {version: names for version, names in versions.items() if version}
        script.write_text(
            "".join(f"{v} {{ global: {' '.join(f'{n};' for n in sorted(names))} }};\n" for v, names in named.items())
        )
        versioned = [f"-Wl,--version-script={script}"] if named else []
        shared = [*compiler, "-shared", "-fPIC", "-nostdlib", "-w", f"-Wl,-soname,{library.name}", *versioned]
        subprocess.run([*shared, "-o", str(library), str(source)], check=True)


def main(torch: Path, compiler: Sequence[str]) -> None:
    """Write the stubs into `lib`, where torch's files look for what they need."""
    files = [path for path in (*torch.glob("lib/lib*.so"), *torch.glob("*.so")) if not path.name.startswith(NVIDIA)]
    for name, versions in wanted(files).items():
        write(torch / "lib" / name, versions, compiler)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
