//! The driver seam's contract, promise by promise, asked of every backend alike.
//!
//! The fault it guards against: two backends that differ in what they promise. Then the tests on the
//! simulated device prove nothing about a real one. A backend is added with one line in the list at
//! the end: its name, and a function that gives the rigs to ask.

// Helpers outside `#[test]` functions unwrap too: a failed call there is a failed test.
#![allow(clippy::unwrap_used)]

#[path = "conformance/memory.rs"]
mod memory;
#[path = "conformance/order.rs"]
mod order;
#[path = "conformance/refusal.rs"]
mod refusal;
#[path = "conformance/rig.rs"]
mod rig;

macro_rules! conformance {
    ($($backend:ident: $rigs:path;)*) => {
        $(mod $backend {
            promises! { $rigs;
                order::bytes_come_back_from_another_stream,
                order::a_reader_behind_a_wait_sees_no_torn_copy,
                order::a_wait_keeps_the_recording_it_saw,
                order::a_later_recording_replaces_the_earlier,
                order::a_done_event_means_the_bytes_are_there,
                order::a_closed_event_still_orders_the_waits_enqueued,
                order::a_closed_stream_finishes_its_work,
                order::two_users_share_a_stream_by_its_raw_handle,
                order::the_default_stream_is_there_to_adopt,
                order::a_fence_answers_on_another_thread,
                order::elapsed_wants_two_timed_recordings_that_are_done,
                memory::freed_bytes_are_not_lent_before_their_readers_are_done,
                memory::streams_never_share_an_allocation,
                memory::accounts_follow_allocations_and_frees,
                memory::too_large_an_allocation_changes_nothing,
                memory::allocations_are_aligned_and_disjoint,
                memory::an_unregistered_range_is_gone,
                refusal::lengths_that_differ_are_refused,
                refusal::empty_requests_are_refused,
                refusal::a_copy_over_two_registrations_is_refused,
                refusal::a_fresh_event_is_neither_waited_for_nor_asked,
                refusal::stale_names_are_refused,
                refusal::names_of_another_user_are_refused,
                refusal::a_free_of_no_allocation_is_refused,
                refusal::a_kernel_without_a_form_is_refused,
            }
        })*
    };
}

macro_rules! promises {
    ($rigs:path; $($topic:ident::$promise:ident,)*) => {
        $(#[test]
        fn $promise() {
            for rig in $rigs() {
                crate::$topic::$promise(&*rig);
            }
        })*
    };
}

conformance! {
    timed: crate::rig::timed;
    adversary: crate::rig::adversaries;
}
