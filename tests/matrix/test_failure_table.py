"""What can go wrong in a run, what happens then, and the tests that really make it go wrong."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAILURES: dict[str, tuple[str, ...]] = {
    "out of memory on the device: oom_device, longer lengths are skipped, the next cell is ok": (
        "matrix/drive/test_failures.py::test_every_failure_has_its_name_and_disturbs_no_other_cell",
        "matrix/cell/test_run_order.py::test_out_of_memory_on_the_gpu_is_a_result",
    ),
    "out of memory on the host: oom_host, and the runner lives": (
        "matrix/cell/test_run_order.py::test_under_the_memory_limit_an_allocation_fails_cleanly_and_small_ones_work",
        "matrix/cell/test_bundle.py::test_a_member_that_ends_the_process_takes_the_blame_and_the_others_begin_anew",
        "matrix/drive/test_failures.py::test_a_kill_of_a_process_that_had_most_of_the_memory_is_out_of_memory",
    ),
    "segmentation fault, abort, exit: crashed, with the signal and the stack": (
        "matrix/drive/test_failures.py::test_every_failure_has_its_name_and_disturbs_no_other_cell",
        "matrix/cell/test_bundle.py::test_a_member_that_ends_the_process_takes_the_blame_and_the_others_begin_anew",
        "matrix/drive/engines/test_local.py::test_every_training_ends_in_its_own_status_and_disturbs_no_other",
    ),
    "an error that leaves the device unusable: the process is not used again": (
        "matrix/cell/test_bundle.py::test_a_device_that_an_error_left_unusable_ends_the_process",
    ),
    "hang that ignores signals and leaves processes behind: timeout, and nothing is left": (
        "matrix/drive/test_failures.py::test_every_failure_has_its_name_and_disturbs_no_other_cell",
        "matrix/cell/test_bundle.py::test_a_member_that_hangs_is_timed_out_alone_and_its_longer_lengths_are_not_tried",
    ),
    "loss that is not finite: diverged, with the step": (
        "matrix/drive/test_failures.py::test_every_failure_has_its_name_and_disturbs_no_other_cell",
        "training/test_run.py::test_divergence_names_the_step",
        "training/test_run.py::test_a_finite_loss_with_an_infinite_gradient_diverges",
        "matrix/drive/engines/test_local.py::test_every_training_ends_in_its_own_status_and_disturbs_no_other",
    ),
    "Ctrl-C: once, after the running cell; twice, at once; exit code 130": (
        "matrix/drive/test_interruptions.py::test_ctrl_c_once_finishes_the_running_cell_and_says_how_to_go_on",
        "matrix/drive/test_interruptions.py::test_ctrl_c_twice_ends_at_once_without_half_a_record",
        "matrix/drive/engines/test_local.py::test_a_run_with_several_trainings_can_be_ended_and_goes_on",
    ),
    "SIGKILL of the runner: at most the running cell is lost, and no process is left": (
        "matrix/drive/test_interruptions.py::test_kill_9_at_many_moments_loses_at_most_the_running_cell",
        "matrix/drive/test_interruptions.py::test_what_left_the_session_of_a_worker_does_not_outlive_a_killed_runner",
        "test_whole_files.py::test_at_every_step_of_a_write_the_file_is_the_old_or_the_new_one",
        "training/test_killed.py::test_a_killed_run_ends_with_the_same_numbers",
    ),
    "disk full or read-only: one sentence, exit code 4, what there was stays": (
        "matrix/store/test_store.py::test_a_full_disk_is_named_and_leaves_nothing_half_written",
        "matrix/store/test_store.py::test_a_read_only_disk_is_named",
        "matrix/drive/test_full_disk.py::test_a_checkpoint_that_cannot_be_written_is_no_result",
        "matrix/cell/test_log.py::test_printing_to_a_full_disk_is_no_failure",
        "matrix/cell/test_log.py::test_a_variant_that_prints_without_end_fills_no_disk",
    ),
    "damaged, hostile or foreign record: set aside with its reason by every reader; newer ones are refused": (
        "test_folder.py::test_a_hostile_record_is_set_aside_by_every_reader",
        "test_folder.py::test_a_flipped_bit_is_noticed_and_records_without_a_checksum_are_read",
        "test_folder.py::test_what_is_no_regular_file_is_refused_at_once",
        "matrix/store/test_store.py::test_what_is_no_record_goes_to_quarantine_with_its_reason",
        "matrix/store/test_store.py::test_no_damage_to_a_record_makes_reading_fail_or_lie",
        "matrix/store/test_store.py::test_newer_schemas_are_refused_with_advice",
        "matrix/store/test_store.py::test_nothing_is_written_through_a_link",
    ),
    "two runners on one folder: the second is told who is there; the lock of a killed one is free": (
        "matrix/drive/test_interruptions.py::test_a_second_runner_is_refused_and_the_first_not_disturbed",
        "matrix/store/test_store.py::test_the_lock_of_a_killed_holder_is_free",
        "matrix/store/test_store.py::test_shards_of_unlike_counts_do_not_run_at_once",
    ),
    "malformed matrix: all problems at once, exit code 2, nothing is written": (
        "matrix/plan/test_schema.py::test_each_mistake_is_named_at_its_place",
        "matrix/plan/test_schema.py::test_files_that_are_no_matrix",
        "matrix/plan/test_schema.py::test_a_thousand_million_cells_are_refused_before_they_are_made",
        "test_cli.py::test_a_broken_matrix_is_reported_whole_and_nothing_is_written",
    ),
    "unknown name: exit code 2 and the nearest one": (
        "test_cli.py::test_a_typo_is_one_line_with_the_nearest_name",
        "test_cli.py::test_mistakes_are_one_message_with_exit_code_two",
    ),
    "plug-in that raises, exits, crashes, hangs or registers twice: listed with its reason, the others work": (
        "test_discovery.py::test_a_bad_package_is_listed_with_its_reason_and_the_others_work",
        "test_discovery.py::test_a_package_that_hangs_does_so_once_for_all_processes",
        "matrix/drive/test_failures.py::test_every_failure_has_its_name_and_disturbs_no_other_cell",
        "test_discovery.py::test_what_a_package_prints_is_not_what_was_asked_for",
    ),
    "variant that breaks the contract: the broken promise is named, and nothing is timed": (
        "conformance/test_broken.py::*",
        "conformance/test_gate.py::test_stops_broken_variants_by_name",
        "matrix/drive/test_failures.py::test_every_failure_has_its_name_and_disturbs_no_other_cell",
        "matrix/cell/test_bundle.py::test_a_member_that_changes_the_process_fails_and_its_neighbours_do_not_notice",
    ),
    "malicious archive: refused while it streams": (
        "tasks/sources/test_archive.py::test_malicious_archives_are_refused_without_a_trace",
        "tasks/sources/test_archive.py::test_bombs_are_refused_while_they_stream",
        "tasks/sources/test_archive.py::test_nothing_is_ever_written_outside",
    ),
    "pickled code in data or checkpoints: never loaded": ("test_architecture.py::*",),
    "formulas, markup and escape codes in names: text, wherever they are shown": (
        "report/tables/test_table.py::test_guarded_text_never_starts_a_formula",
        "report/pages/test_html.py::test_names_and_reasons_are_text_not_markup",
        "report/pages/test_html.py::test_an_injected_script_does_not_run",
        "test_cli.py::test_nothing_in_a_results_folder_steers_the_terminal",
    ),
    "throttling and a busy host: a flag on the timing": (
        "matrix/cell/test_disturbed.py::test_other_work_is_told_from_the_steps_of_processor_times",
    ),
    "changed environment: refused unless asked for, and kept apart": (
        "matrix/store/test_store.py::test_environments_do_not_mix_unless_asked",
        "matrix/drive/test_run_plan.py::test_another_environment_is_refused_before_anything_runs",
        "test_records.py::test_an_environments_digest_is_of_what_decides_a_time",
        "test_folder.py::test_folders_that_name_each_host_apart_are_one_environment",
    ),
    "changed or missing data: an error that names the file; unsupported, with the way to get them": (
        "tasks/sources/test_source.py::test_files_that_changed_since_they_were_recorded_are_refused",
        "matrix/kinds/test_accuracy.py::test_missing_data_are_refused_with_the_way_to_get_them",
        "training/test_run.py::test_a_checkpoint_is_not_continued_with_other_data",
    ),
    "lost node or driver": ("matrix/drive/engines/test_ray.py::*",),
    "optional package that is half broken: unsupported, with the reason": (
        "kernels/exact/test_sdpa.py::test_a_half_broken_xformers_is_a_reason",
        "matrix/drive/engines/test_ray.py::*",
    ),
    "memory of a GPU that is not free yet: waited for, else a flag": (
        "matrix/cell/test_run_order.py::test_what_has_just_ended_on_the_gpu_is_waited_for_and_what_stays_is_a_flag",
    ),
    "source edited before a run goes on: only its cells are stale": (
        "matrix/plan/test_source_digest.py::test_an_edit_makes_stale_what_runs_the_edited_code",
        "matrix/drive/test_run_plan.py::test_records_of_changed_sources_are_stale_and_of_other_matrices_other",
        "matrix/drive/test_failures.py::test_a_source_that_changes_under_a_run_is_not_measured_as_the_old_one",
    ),
    "very long names and any letters: files are named after keys": (
        "matrix/store/test_store.py::test_names_of_any_length_and_letters_are_no_names_of_files",
    ),
}


def test_all_rows_are_here():
    assert len(FAILURES) == 26


@pytest.mark.parametrize("failure", FAILURES)
def test_each_failure_is_made_to_happen(failure):
    for place in FAILURES[failure]:
        file, _, name = place.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in names if name != "*" else any(each.startswith("test_") for each in names), place
