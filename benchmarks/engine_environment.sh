# What install_vllm_cpu.sh and install_sglang_cpu.sh share; read by them, never run. `here` is this folder.

pinned() { # NAME: its version
    sed -n "s/^$1 = \"\([^\"]*\)\".*/\1/p" "$here/../src/polyrl/engines/served/versions.py"
}

# A file that is written last says that an environment is whole: an install that was cut off starts again.
is_installed() { # FOLDER DISTRIBUTION VERSION
    [ "$(cat "$1/polyrl-installed" 2> /dev/null)" = "$2 $3" ]
}

mark_installed() { # FOLDER DISTRIBUTION VERSION
    echo "$2 $3" > "$1/polyrl-installed"
    echo "$2 $3 is in $1"
}

make_environment() { # FOLDER: sets `folder`, and `packages`, where its packages lie
    folder=$1
    echo "installing into $folder; this takes a few minutes"
    "${PYTHON:-python3}" -m venv --clear "$folder"
    packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    install --upgrade pip wheel packaging
    install "torch==$(pinned TORCH)"
}

install() {
    "$folder/bin/python" -m pip install -q --disable-pip-version-check "$@"
}

install_needed() { # DISTRIBUTION NAME...: what it declares to need on this machine, but for those NAMEs
    "$folder/bin/python" - "$@" > "$folder/needed.txt" << 'PYTHON'
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

for needed in map(Requirement, requires(sys.argv[1]) or []):
    if needed.name.lower() not in sys.argv[2:] and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
        needed.marker = None
        print(needed)
PYTHON
    install -r "$folder/needed.txt"
}
