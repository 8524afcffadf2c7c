"""What compute-sanitizer's racecheck says is read right: whose kernels it names."""

from tests.gpu.sanitize import only_others

OURS = "========= Error: Race reported between Read access at _learn+0xb00\n"
CUBLAS = OURS.replace("_learn", "nvjet_sm90_tst_64x40_64x16_2x4_h_bz_NNT")
TORCH = OURS.replace("_learn", "void at::native::reduce_kernel<(int)512, (int)1>(T3)")


def test_races_are_judged_by_whose_kernel_it_is() -> None:
    assert only_others(CUBLAS + TORCH)
    assert not only_others(CUBLAS + OURS + TORCH)
    assert not only_others("")
    assert not only_others(CUBLAS + "========= Internal Sanitizer Error")
