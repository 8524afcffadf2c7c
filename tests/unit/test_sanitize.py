"""What compute-sanitizer's racecheck says is read right: whose races it names."""

import inspect

from tests.gpu import specialized
from tests.gpu.sanitize import only_others, races

OURS = "========= Error: Race reported between Read access at _learn+0xb00 in steps.py:12\n"
CUBLAS = OURS.replace("_learn", "nvjet_sm90_tst_64x40_64x16_2x4_h_bz_NNT")
TORCH = OURS.replace("_learn", "void at::native::reduce_kernel<(int)512>(T3)")


def test_races_are_judged_by_whose_kernel_it_is() -> None:
    assert only_others(CUBLAS + TORCH)
    assert not only_others(CUBLAS + OURS + TORCH)
    assert not only_others("")
    assert not only_others(CUBLAS + "========= Internal Sanitizer Error")


def test_what_triton_reads_at_a_kernels_definition_is_not_ours() -> None:
    definition = inspect.getsource(specialized).splitlines().index("def _kernel(out):") + 1
    own = f"Error: Race reported between Read access at _kernel+0x120 in specialized.py:{definition}\n"
    assert only_others(own + "    and Write access at _kernel+0x5f0 in specialized.py:28 [20 hazards]\n")
    assert not only_others(own.replace(f":{definition}", f":{definition + 1}"))
    assert not only_others(own.replace("Read", "Write"))
    assert not only_others(own.replace("specialized.py", "elsewhere.py"))
    assert [race.line for race in races(own + OURS)] == [str(definition), "12"]
