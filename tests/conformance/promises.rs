//! The list of promises, to be instantiated for one backend after another.
//!
//! What is not in it, since only the simulated device can promise it (`tests/simulated*.rs`):
//!
//! * That a copy of device bytes outside every allocation is refused. A driver learns of them when
//!   the copy runs, if at all; who wants to know before asks for the allocation.
//! * That memory is not unpinned under a copy. Of a driver it is asked only when no copy is in
//!   flight, which is the caller's word (`Pinner::unregister`).
//! * That a stream closed by its owner is stale to those who adopted it. To a driver the handle is
//!   a pointer; that its owner keeps it alive is the owner's word (`Backend::adopt_stream`).
//! * That unmapped bytes take no work, and that unmapping bytes in use is a loss. A driver says so
//!   when the work runs, and then the process is over.
//! * What kernels do. Each backend runs a form of its own; that one without a form for it is
//!   refused is a promise here.
//! * That the last bytes of a device are lent once frees before them have run. No test can have all
//!   of a device's memory where others use it too.

/// Calls a macro with all promises, behind the tokens given.
macro_rules! each_promise {
    ($instantiate:ident! $($with:tt)*) => {
        $instantiate! {
            $($with)*;
            order::bytes_come_back_from_another_stream,
            order::a_reader_behind_a_wait_sees_no_torn_copy,
            order::a_wait_keeps_the_recording_it_saw,
            order::a_later_recording_replaces_the_earlier,
            order::a_done_event_means_the_bytes_are_there,
            order::an_idle_stream_has_left_its_bytes_there,
            order::a_closed_event_still_orders_the_waits_enqueued,
            order::a_closed_stream_finishes_its_work,
            order::two_users_share_a_stream_by_its_raw_handle,
            order::the_default_stream_is_there_to_adopt,
            order::elapsed_wants_two_timed_recordings_that_are_done,
            threads::a_fence_answers_on_another_thread,
            threads::a_fence_outlives_the_user_it_came_from,
            threads::users_on_several_threads_do_not_disturb_one_another,
            threads::a_user_moves_to_another_thread_with_its_work,
            memory::freed_bytes_are_not_lent_before_their_readers_are_done,
            memory::streams_never_share_an_allocation,
            memory::accounts_follow_allocations_and_frees,
            memory::too_large_an_allocation_changes_nothing,
            memory::allocations_are_aligned_and_disjoint,
            memory::an_unregistered_range_is_gone,
            memory::an_allocation_is_known_by_each_of_its_addresses,
            mapping::bytes_come_and_go_and_their_address_stays,
            mapping::several_pieces_of_memory_are_one_range,
            mapping::mapped_bytes_are_bytes_of_every_stream,
            mapping::what_is_mapped_is_neither_mapped_again_nor_given_back,
            mapping::mappings_that_do_not_fit_are_refused,
            mapping::mapped_bytes_are_known_as_an_allocation,
            mapping::accounts_follow_memory_and_not_addresses,
            refusal::lengths_that_differ_are_refused,
            refusal::empty_requests_are_refused,
            refusal::a_copy_over_two_registrations_is_refused,
            refusal::a_fresh_event_is_neither_waited_for_nor_asked,
            refusal::stale_names_are_refused,
            refusal::names_of_another_user_are_refused,
            refusal::a_free_of_no_allocation_is_refused,
            refusal::a_kernel_without_a_form_is_refused,
            refusal::a_captured_stream_takes_no_work,
        }
    };
}
