"""Loops by authors who had not read the engine, under `halfstep check`.

The first result of a set is evidence, and is in benchmarks/results/held_out.md. From then on it is
a regression test.
"""

import pytest

from tests.diagnosis import held_out_cases
from tests.diagnosis.held_out_cases import Case, cases

COLLECTIONS = (
    *("reported", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"),
    *("ninth", "tenth", "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth"),
    *("sixteenth", "seventeenth", "eighteenth", "nineteenth", "twentieth", "twenty_first"),
    "twenty_second",
)
#: Cases that are not named right, with what they get.
MISSED = {
    "first/depth_holes": "partly",  # where a list becomes a tensor, a line below
    "first/hawkes_grid": "partly",  # another line that repairs the loss
    "fourth/wake_word_bf16": "partly",  # where an array becomes a tensor, a line below
    "second/vocoder_f0": "partly",  # where a list becomes a tensor, a line below
    "twelfth/twotower_bf16_weights": "partly",  # the step, before the cast is seen
    "twenty_second/apex_o3_digits": "partly",  # the step, not the optimizer
    "twenty_second/changeformer_half_siamese": "partly",
    "twenty_second/pykoi_reward_model": "partly",
    "twenty_second/sparseconvnet_shapes": "wrong",  # as carried, with the line that has made it
    "twenty_first/gpt2_mask_attn_weights": "wrong",  # torch.tensor(1e10), which no operator sees
    "twenty_first/hlb_cifar_onecycle_half": "wrong",  # the same
    "twenty_first/magic_animate_motion_half": "partly",  # the step, not the optimizer
    "twenty_first/nvtabular_rossmann_torch": "wrong",  # the overflow, not the missing scaler
    "twentieth/paddle_digits": "partly",  # the backward pass
    "second/moment_adapt": "partly",
    "third/baked_grid_image": "partly",
    "fifth/coral_adapt": "partly",
    "fifth/radar_nowcast": "partly",
    "eighth/archive_energies": "partly",
    "eighth/hypergrad_ecg": "silent",
    "eighth/rotation_views": "partly",
    "tenth/locomotion_obs_norm": "partly",
    "tenth/tide_gauge_fourier": "partly",
    "tenth/wind_farm_scada": "partly",
    "eleventh/sds_texture": "partly",
    "eleventh/weather_downscaling": "partly",
    "twelfth/audio_lars_scale": "partly",
    "twelfth/ecg_twelve_lead": "partly",
    "twelfth/strain_maml": "wrong",  # the loss that differs, not the gradients within it
    "thirteenth/crop_index_tiles": "partly",
    "thirteenth/stem_separation_zclip": "partly",
    "fourteenth/cell_cycling_weeks": "partly",  # the file is read by NumPy
    "sixteenth/glide_half_finetune": "partly",  # the step, not the optimizer with its eps
    "fourteenth/modrec_taylor_prune": "silent",  # a NaN of a state that only a comparison sees
    "nineteenth/languini_grad_stats": "silent",  # scaled norms that are only logged: a note
    "nineteenth/moe_dapo_policy": "partly",  # the step and the cast, not the optimizer
    "eighteenth/coqui_epoch_scheduler": "silent",  # a scheduler that is never stepped
    "eighteenth/fastai_accum_callbacks": "silent",  # a scaled loss that is only logged
    "eighteenth/lcn_aerial_segments": "partly",  # an overflow before the one that lasts
    "eighteenth/megatron_config_copy": "silent",  # unscaled gradients that are divided by a scale
    "eighteenth/mmseg_resume_fp16_hook": "silent",  # momenta that a copy of the groups loses
    "eighteenth/tabicl_float32_fa3": "silent",  # gradients that are 0 in one step
    "eighteenth/unfused_engine_norm": "silent",  # a scaled norm that is only logged
    "eighteenth/yolo_resume_adamw": "partly",  # where the state is loaded, not where it is saved
    "eighteenth/zero0_bf16_engine": "silent",  # unscaled gradients that are divided by a scale
    "seventeenth/espnet_accum_trainer": "partly",  # the step after a skip, not zero_grad
    "seventeenth/ocp_energy_trainer": "silent",  # a number of Python that is only logged
    "seventeenth/tomogram_mode12": "silent",  # inputs that NumPy has made 0
    "seventeenth/xla_bf16_trainer_log": "partly",  # the weights' lost updates before the log's
    "seventeenth/yolo_batched_nms_val": "silent",  # an overflow of a validation that is compared
}
#: The same of watched runs: silent where the failing step was not armed, or no weights are left.
MISSED_WATCHED = {
    "twenty_second/apex_o3_digits": "partly",
    "twenty_second/changeformer_half_siamese": "partly",
    "twenty_second/makemore_mlp_names": "silent",
    "twenty_second/pykoi_reward_model": "partly",
    "twenty_second/sparseconvnet_shapes": "silent",
    "twenty_second/vmamba_vssm_eval": "silent",
    "twenty_first/adan_half_embeddings": "partly",
    "twenty_first/gpt2_mask_attn_weights": "wrong",  # torch.tensor(1e10), which no operator sees
    "twenty_first/hlb_cifar_onecycle_half": "silent",  # a loop that steps by hand
    "twenty_first/magic_animate_motion_half": "partly",
    "twenty_first/nvtabular_rossmann_torch": "silent",
    "twenty_first/transformers_gpt2_padded_half": "silent",  # all steps are left out by hand
    "twentieth/big_vision_vit": "partly",  # the step, not the cast before the watch
    "twentieth/causvid_ode_generator": "partly",
    "twentieth/dlt_lstm_sentiment": "silent",
    "twentieth/paddle_digits": "partly",
    "twentieth/xla_bn_segmentation": "silent",
    "nineteenth/languini_grad_stats": "silent",
    "nineteenth/moe_dapo_policy": "partly",
    "nineteenth/rtmdet_rotated_iou": "partly",
    "eighteenth/coqui_epoch_scheduler": "silent",
    "eighteenth/fastai_accum_callbacks": "silent",
    "eighteenth/gated_deltanet_heads": "silent",  # a weight, in whose first step nothing is armed
    "eighteenth/lncc_registration": "partly",
    "eighteenth/megatron_config_copy": "silent",
    "eighteenth/mmseg_resume_fp16_hook": "silent",
    "eighteenth/tabicl_float32_fa3": "silent",
    "eighteenth/unfused_engine_norm": "silent",
    "eighteenth/yolo_resume_adamw": "partly",
    "eighteenth/zero0_bf16_engine": "silent",
    "seventeenth/espnet_accum_trainer": "partly",
    "seventeenth/flow_dpo_outer_autocast": "partly",
    "seventeenth/ocp_energy_trainer": "silent",
    "seventeenth/tomogram_mode12": "silent",
    "seventeenth/xla_bf16_trainer_log": "partly",
    "seventeenth/yolo_batched_nms_val": "silent",
    "sixteenth/glide_half_finetune": "partly",
    "sixteenth/mask_query_matcher": "silent",
    "sixteenth/neox_long_copy": "silent",
    "sixteenth/relation_marginals": "silent",
    "sixteenth/semantic_ignore_tiles": "silent",
    "sixteenth/twin_sensor_cosine": "silent",
    "fifteenth/aim_latents_bf16": "partly",
    "fifteenth/npz_text_cache": "partly",
    "fifteenth/opt_adapter_batches": "partly",
    "fifteenth/pulse_conv_validation": "wrong",  # the overflow, not the statistics that it leaves
    "fifteenth/seq2seq_toy_translation": "silent",
    "fourteenth/airquality_kernel": "silent",
    "fourteenth/cell_cycling_weeks": "partly",
    "fourteenth/dental_sdf": "silent",
    "fourteenth/gimbal_slerp": "silent",
    "fourteenth/modrec_taylor_prune": "silent",
    "fourteenth/retention_logcosh": "silent",
    "fourteenth/svrg_neutron_probe": "partly",
    "thirteenth/crop_index_tiles": "partly",
    "thirteenth/opcode_lm_sophia": "silent",
    "thirteenth/rna_counts_vae": "silent",
    "thirteenth/stem_separation_zclip": "partly",
    "thirteenth/transducer_aligned": "silent",
    "twelfth/audio_lars_scale": "silent",
    "twelfth/ecg_twelve_lead": "partly",
    "twelfth/genome_linear_attention": "silent",
    "twelfth/sac_utd_updates": "partly",
    "twelfth/strain_maml": "wrong",
    "twelfth/twotower_bf16_weights": "partly",
    "eleventh/progressive_fade_in": "silent",
    "eleventh/sds_texture": "partly",
    "eleventh/weather_downscaling": "partly",
    "tenth/chat_lm_accum_spike": "partly",
    "tenth/summary_encoder_ckpt": "silent",
    "tenth/tide_gauge_fourier": "partly",
    "tenth/wind_farm_scada": "partly",
    "ninth/film_upscaler": "silent",
    "eighth/archive_energies": "silent",
    "eighth/hypergrad_ecg": "silent",
    "eighth/keyword_observer": "silent",  # a buffer that an earlier step has made so
    "eighth/relora_merge": "silent",
    "eighth/retina_pearson": "silent",
    "eighth/rotation_views": "partly",
    "seventh/ewc_gestures": "silent",
    "seventh/tremor_rms_half": "silent",
    "sixth/gauge_csv": "partly",
    "sixth/grpo_filtered": "silent",
    "sixth/muon_modality": "silent",
    "sixth/poincare_taxonomy": "silent",
    "fifth/coral_adapt": "partly",
    "fifth/dense_depth": "silent",
    "fifth/half_rmsprop_bandit": "partly",
    "fifth/radar_nowcast": "partly",
    "reported/mask_finfo_min": "partly",
    "first/balanced_heads": "silent",
    "first/centernet_heatmap": "silent",
    "first/convstft_ctc": "silent",
    "first/depth_holes": "partly",
    "first/fedavg_server": "silent",
    "first/flow_epe_static": "silent",
    "first/grpo_digits": "silent",
    "first/local_prior_encoder": "silent",
    "first/moco_hdr_queue": "partly",
    "first/nerf_bf16_encoding": "silent",
    "first/realnvp_tabular": "silent",
    "first/supcon_bf16": "silent",
    "second/half_adam_decoder": "partly",
    "second/kfac_regression": "silent",
    "second/moment_adapt": "partly",
    "second/pcgrad_guard": "wrong",
    "third/baked_grid_image": "partly",
    "third/pose_bones": "silent",
    "third/rotary_kv_offset": "partly",
    "third/visit_collate": "silent",
    "fourth/spike_guard": "partly",
    "fourth/wake_word_bf16": "silent",
    "fourth/walk_reinforce": "silent",
}
#: Of different causes, each in a few seconds; the others are extended.
SAMPLE = {"reported/carried_state", "reported/penalty_on_scaled_gradients"}


def each() -> list[object]:
    """Return all cases as parameters."""
    return [
        pytest.param(
            case, id=case.name, marks=[] if case.name in SAMPLE else [pytest.mark.extended]
        )
        for collection in COLLECTIONS
        for case in cases(collection)
    ]


@pytest.mark.parametrize("case", each())
def test_a_case_is_named_and_no_bit_changes(case: Case) -> None:
    """A case's first mistake has its cause and line, and no advice contradicts measured facts."""
    judged = held_out_cases.judge(case)
    assert judged.is_same
    assert judged.named == MISSED.get(case.name, "right"), [row.text for row in judged.rows]
    assert not judged.harmful


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("case", each())
def test_a_watched_run_names_the_case_or_says_that_it_is_unknown(case: Case) -> None:
    """A watched case gets no other cause as certain, and no remedy that measurably fails."""
    judged = held_out_cases.judge_watched(case)
    assert judged.is_same
    assert judged.named == MISSED_WATCHED.get(case.name, "right"), [row.text for row in judged.rows]
    assert not judged.harmful


def test_each_set_has_causes_and_healthy_loops() -> None:
    """Every held-out case has its facts, and every faulty one its lines."""
    for collection in COLLECTIONS[1:]:
        assert sum(case.cause == "none" for case in cases(collection)) >= 5
    for collection in COLLECTIONS:
        for case in cases(collection):
            assert {"summary", "finite_in_fp32", "finite_in_bf16"} <= set(case.facts), case.name
            assert bool(case.marks()) == (case.cause != "none"), case.name
