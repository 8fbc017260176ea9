from __future__ import annotations

import threading
from dataclasses import replace

import pytest

import fa4
from fa4._settings import Settings, current, from_environment


def test_environment_is_mirrored():
    assert from_environment({}) == Settings()
    assert from_environment({"FA4_CPU_PATH": "tiled", "HOME": "/"}) == Settings(cpu_path="tiled")
    variables = {"FA4_CACHE": "0", "FA4_CACHE_DIR": "/a/b", "FA4_CACHE_SIZE": "64"}
    assert from_environment(variables) == Settings(cache=False, cache_dir="/a/b", cache_size=64)
    variables = {"FA4_VGPU_SEED": "5", "FA4_VGPU_SCHEDULE": "priority", "FA4_VGPU_DELAY": "early", "FA4_VGPU_PROCESSES": "2"}
    assert from_environment(variables) == Settings(vgpu_seed=5, vgpu_schedule="priority", vgpu_delay="early", vgpu_processes=2)
    for text, value in {"1": True, "true": True, "On": True, "0": False, "FALSE": False, "off": False}.items():
        assert from_environment({"FA4_CACHE": text}) == Settings(cache=value)


def test_unknown_variable_warns_and_names_the_known_ones():
    with pytest.warns(UserWarning, match=r"FA4_CPU_PTAH; known ones: .*FA4_CPU_PATH"):
        assert from_environment({"FA4_CPU_PTAH": "tiled"}) == Settings()


def test_an_empty_variable_is_an_unset_one():
    assert from_environment({"FA4_CACHE_DIR": "", "FA4_CPU_PATH": ""}) == Settings()


def test_bad_values_raise():
    with pytest.raises(fa4.ArgumentError, match=r"FA4_CPU_PATH='fast'.*auto, tiled"):
        from_environment({"FA4_CPU_PATH": "fast"})
    with pytest.raises(fa4.ArgumentError, match="cpu_path='fast'"), fa4.settings(cpu_path="fast"):
        pass
    for variables, message in (
        ({"FA4_CACHE": "maybe"}, "FA4_CACHE='maybe'.*use one of True, False"),
        ({"FA4_VGPU_DELAY": "never"}, "FA4_VGPU_DELAY='never'.*use one of late, early"),
        ({"FA4_CACHE_SIZE": "0"}, "FA4_CACHE_SIZE='0': must be a whole number of MiB"),
        ({"FA4_CACHE_SIZE": "1GB"}, "FA4_CACHE_SIZE='1GB'"),
        ({"FA4_VGPU_PROCESSES": "0"}, "FA4_VGPU_PROCESSES='0': must be a whole number, at least 1"),
        ({"FA4_VGPU_PROCESSES": "all"}, "FA4_VGPU_PROCESSES='all'"),
    ):
        with pytest.raises(fa4.ArgumentError, match=message):
            from_environment(variables)
    for setting in ({"cache": 1}, {"cache": "1"}, {"cache_size": 1.5}, {"cache_size": True}, {"cache_dir": 3}, {"cache_dir": ""}):
        with pytest.raises(fa4.ArgumentError), fa4.settings(**setting):
            pass
    with pytest.raises(fa4.ArgumentError, match=r"cpu_ptah='tiled'.*settings are cpu_path"), fa4.settings(cpu_ptah="tiled"):
        pass


def test_block_restores_also_after_an_error():
    before = current()

    def fail_inside():
        with fa4.settings(cpu_path="tiled") as inside:
            assert inside == current() == replace(before, cpu_path="tiled")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside()
    assert current() == before


def test_another_thread_does_not_see_the_change():
    seen = []
    with fa4.settings(cpu_path="tiled"):
        thread = threading.Thread(target=lambda: seen.append(current().cpu_path))
        thread.start()
        thread.join()
    assert seen == ["auto"]


def test_settings_are_immutable():
    with pytest.raises(AttributeError):
        current().cpu_path = "tiled"


def test_cpu_path_chooses_the_path(monkeypatch):
    """Read when the op runs, so a compiled function obeys it too."""
    import torch

    from fa4.cpu import torch_flash

    calls = []
    for name in ("forward", "backward"):
        original = getattr(torch_flash, name)
        monkeypatch.setattr(torch_flash, name, lambda *a, original=original, name=name: (calls.append(name), original(*a))[1])
    x = torch.randn(1, 16, 2, 16, requires_grad=True)
    compiled = torch.compile(fa4.attention, fullgraph=True, backend="aot_eager")
    for function in (fa4.attention, compiled):
        for path, expected in (("auto", ["forward", "backward"]), ("tiled", [])):
            calls.clear()
            with fa4.settings(cpu_path=path):
                function(x, x, x).sum().backward()
            assert calls == expected
