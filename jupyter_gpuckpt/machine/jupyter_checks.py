"""Checks of what Jupyter needs to start a kernel that can be saved."""

from __future__ import annotations

import importlib.metadata

from jupyter_client.kernelspec import KernelSpecManager

from .checks import Check, judge

__all__ = ["jupyter_checks"]

_PROVISIONER = "gpuckpt-provisioner"
_PROVISIONERS = "jupyter_client.kernel_provisioners"
_REINSTALL = "Run `pip install jupyter_gpuckpt` in the environment of the Jupyter server."


def jupyter_checks() -> list[Check]:
    """Return the checks of Jupyter's packages and of what this project adds to them."""
    return [_package("jupyter_client", 8), _package("ipykernel", 6), _provisioner(), _kernelspec()]


def _package(name: str, oldest: int) -> Check:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    major = version.partition(".")[0]
    return judge(
        name,
        major.isdecimal() and int(major) >= oldest,
        version or "not installed",
        f"Version {oldest} or newer is needed to start and run the kernels.",
        f"Run `pip install --upgrade {name}` in the environment of the Jupyter server.",
    )


def _provisioner() -> Check:
    found = importlib.metadata.entry_points(group=_PROVISIONERS, name=_PROVISIONER)
    return judge(
        "provisioner",
        bool(found),
        next((entry.value for entry in found), "not registered"),
        "Jupyter uses it to start kernels that can be saved.",
        _REINSTALL,
    )


def _kernelspec() -> Check:
    names = sorted(
        name
        for name, spec in KernelSpecManager().get_all_specs().items()
        if _provisioner_of(spec["spec"].get("metadata")) == _PROVISIONER
    )
    return judge(
        "kernelspec",
        bool(names),
        ", ".join(names) or "none that uses the provisioner",
        "Choose one of these kernels in a notebook to be able to save it.",
        f"{_REINSTALL} It includes the kernel `python3-gpuckpt`.",
    )


def _provisioner_of(metadata: object) -> object:
    chosen = metadata.get("kernel_provisioner") if isinstance(metadata, dict) else None
    return chosen.get("provisioner_name") if isinstance(chosen, dict) else None
