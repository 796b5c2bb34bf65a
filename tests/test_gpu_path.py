"""What of the GPUs' path can be seen on a CPU: its types, its weights, and what refuses to run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.backend import drafter_weights, resolve, target_weights
from eaglejax.config import ConfigError, EngineConfig
from eaglejax.models.layers import dense
from eaglejax.models.rotary import apply_rotary
from eaglejax.quant import QuantTensor, quantise
from eaglejax.state import EngineState
from pallas_kernels.rms_norm.api import rms_norm
from pallas_kernels.swiglu.api import swiglu
from tests import kit

GPU = EngineConfig(kernels="triton", weights="int4", activations="bfloat16")
RNG = np.random.default_rng(0)


def random(*shape: int, dtype: object = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def test_gpu_kernels_by_name_are_refused_where_there_is_no_gpu() -> None:
    with pytest.raises(ConfigError, match="kernels = 'triton': the platform is 'cpu'"):
        resolve(EngineConfig(kernels="triton"))


class Device:
    """A device as JAX describes it."""

    def __init__(self, kind: str, capability: str) -> None:
        self.device_kind, self.compute_capability = kind, capability


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, capability: str) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device(kind, capability)])


def test_auto_takes_the_gpu_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA B200", "10.0")
    found = resolve(EngineConfig())
    assert (found.kernels, found.weights, found.activations) == ("triton", "int4", "bfloat16")
    assert resolve(found) == found
    with pytest.raises(ConfigError, match="kernels = 'cpu': the platform is not a CPU"):
        resolve(EngineConfig(kernels="cpu"))


def test_a_gpu_without_bfloat16_runs_the_reference_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, "Tesla T4", "7.5")
    found = resolve(EngineConfig())
    assert (found.kernels, found.activations) == ("reference", "float32")
    assert "Tesla T4 has compute capability 7.5" in caplog.text
    with pytest.raises(ConfigError, match=r"needs 8\.0"):
        resolve(EngineConfig(kernels="triton"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": "float32"}, "the GPU kernels take 'int4' alone"),
        ({"activations": "float32"}, "they alone, take 'bfloat16'"),
        ({"activations": "int8"}, "only the CPU kernels on INT4 weights"),
        ({"kernels": "reference", "activations": "bfloat16"}, "they alone, take 'bfloat16'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    fields: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "NVIDIA H200", "9.0")
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(**fields))  # type: ignore[arg-type]


def test_caches_and_pending_features_are_of_the_kernels_type() -> None:
    tiny = kit.tiny()
    state = EngineState.create(GPU, tiny.target, tiny.drafter)
    assert state.draft is not None
    assert state.ring is not None
    for array in (state.target.k, state.target.v, state.draft.k, state.ring.features):
        assert array.dtype == jnp.bfloat16
    assert EngineState.create(EngineConfig(), tiny.target, None).target.k.dtype == jnp.float32


def test_weights_take_the_gpu_kernels_form_and_norms_stay_float32() -> None:
    params = {
        "kernel": quantise(random(2, 64, 32, dtype=jnp.float32)),
        "odd": {"kernel": quantise(random(1, 32, 12, dtype=jnp.float32))},
        "embedding": random(16, 8, dtype=jnp.float32),
        "scale": jnp.ones((2, 8)),
    }
    found = target_weights(params, GPU)
    assert isinstance(found["kernel"], QuantTensor)
    assert found["kernel"].layout == "triton"
    assert found["kernel"].values is params["kernel"].values  # nothing is repacked
    assert found["kernel"].scale.dtype == jnp.float32  # random scales are exact in no half type
    assert found["odd"]["kernel"].dtype == jnp.bfloat16  # 12 outputs fill no 32-bit words
    assert found["embedding"].dtype == jnp.bfloat16
    assert found["scale"].dtype == jnp.float32


def test_scales_that_fit_half_precision_are_stored_so() -> None:
    weight = quantise(random(1, 64, 32, dtype=jnp.float32))
    for dtype, factor in ((jnp.float16, 1.0), (jnp.bfloat16, 2.0**20)):
        assert weight.scale is not None
        scale = factor * weight.scale.astype(dtype).astype(jnp.float32)
        found = target_weights({"kernel": weight.replace(scale=scale)}, GPU)["kernel"]
        assert found.scale.dtype == dtype
        np.testing.assert_array_equal(found.scale.astype(jnp.float32), scale)


def test_a_drafter_is_quantised_for_the_gpu_too() -> None:
    variables = {
        "params": {
            "fc": {"kernel": random(1, 96, 32, dtype=jnp.float32)},
            "scale": jnp.ones((1, 3)),
        },
        "vocab": {"embedding": random(16, 32), "target_ids": jnp.arange(4)},
    }
    found = drafter_weights(variables, GPU)
    assert found["params"]["fc"]["kernel"].layout == "triton"
    assert found["params"]["scale"].dtype == jnp.float32
    assert found["vocab"]["target_ids"].dtype == jnp.int32


def test_a_row_has_the_same_bits_among_any_number_of_rows() -> None:
    x, weight = random(64, 96), random(96, 40)
    whole = dense(x, weight, jnp.float32)
    for rows in (1, 3, 16, 63):
        np.testing.assert_array_equal(dense(x[:rows], weight, jnp.float32), whole[:rows])
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    np.testing.assert_allclose(whole, exact, atol=1e-4)


def test_small_ops_compute_in_float32_and_round_once() -> None:
    x, y, scale = random(5, 64), random(5, 64), random(1, 64, dtype=jnp.float32)
    wide = [a.astype(jnp.float32) for a in (x, y)]
    cos, sin = random(1, 5, 8, dtype=jnp.float32), random(1, 5, 8, dtype=jnp.float32)
    heads = x.reshape(1, 5, 4, 16)
    pairs = [
        (rms_norm(x, scale, 0, 1e-5), rms_norm(wide[0], scale, 0, 1e-5)),
        (swiglu(x, y), swiglu(*wide)),
        (apply_rotary(heads, cos, sin), apply_rotary(heads.astype(jnp.float32), cos, sin)),
    ]
    for ours, exact in pairs:
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(ours, exact.astype(jnp.bfloat16))
