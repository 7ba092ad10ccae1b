//! How fast the timed device is: one plain struct of figures.
//!
//! What it is not: it computes nothing but the durations these figures give directly.
//!
//! Invariant: every figure carries its unit in its name. The default is one NVIDIA H200 behind PCIe
//! Gen5 x16, as measured (driver 580, CUDA 13.0).
//!
//! ```text
//!   host call cost | copy: start, then bytes / rate (shared by both ways) | kernel: the slowest of
//!                  |                                                      | flops, bytes, floor
//! ```
//!
//! Anyone may make one; the timed clock reads it.

use crate::backend::{Cost, Work};

/// How much a kernel is slowed while copies run: the part of its time that is added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slowdown {
    /// Added while a copy from the device moves bytes.
    pub out: f64,
    /// Added while a copy to the device moves bytes.
    pub back: f64,
}

/// The timed device's figures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// Name of the device, for messages.
    pub name: &'static str,
    /// Rate of a copy from the device while none goes the other way.
    pub copy_out_bytes_per_s: f64,
    /// Rate of a copy to the device while none goes the other way.
    pub copy_in_bytes_per_s: f64,
    /// Rate of both ways in sum, while both move bytes.
    pub copy_both_bytes_per_s: f64,
    /// Rate of all devices of the world in sum: the host's memory and root ports.
    pub host_bytes_per_s: f64,
    /// Time a copy from the device takes before its first byte moves.
    pub copy_out_start_ns: f64,
    /// Time a copy to the device takes before its first byte moves.
    pub copy_in_start_ns: f64,
    /// Floating-point operations of matrix products.
    pub matrix_flops_per_s: f64,
    /// Other floating-point operations.
    pub vector_flops_per_s: f64,
    /// Rate of the device's own memory.
    pub memory_bytes_per_s: f64,
    /// The least time a kernel takes.
    pub kernel_floor_ns: f64,
    /// What copies take from matrix products.
    pub matrix_slowdown: Slowdown,
    /// What copies take from other kernels, which memory bounds.
    pub vector_slowdown: Slowdown,
    /// Host time to enqueue a copy.
    pub copy_call_ns: f64,
    /// Host time to record an event.
    pub record_call_ns: f64,
    /// Host time to enqueue a wait.
    pub wait_call_ns: f64,
    /// Host time to ask whether an event is done.
    pub query_call_ns: f64,
    /// Host time to allocate or free, each.
    pub alloc_call_ns: f64,
    /// Host time to enqueue a kernel.
    pub launch_call_ns: f64,
    /// Host time to make or destroy an event or stream.
    pub object_call_ns: f64,
}

impl Default for Model {
    fn default() -> Model {
        Model {
            name: "simulated H200",
            copy_out_bytes_per_s: 55.0e9,
            copy_in_bytes_per_s: 54.3e9,
            copy_both_bytes_per_s: 92.8e9,
            host_bytes_per_s: 149.0e9,
            copy_out_start_ns: 3_000.0,
            copy_in_start_ns: 4_400.0,
            matrix_flops_per_s: 705.0e12,
            vector_flops_per_s: 50.0e12,
            memory_bytes_per_s: 3.9e12,
            kernel_floor_ns: 2_000.0,
            matrix_slowdown: Slowdown { out: 0.015, back: 0.020 },
            vector_slowdown: Slowdown { out: 0.0096, back: 0.0129 },
            copy_call_ns: 2_600.0,
            record_call_ns: 400.0,
            wait_call_ns: 400.0,
            query_call_ns: 450.0,
            alloc_call_ns: 450.0,
            launch_call_ns: 2_500.0,
            object_call_ns: 1_000.0,
        }
    }
}

impl Model {
    /// How long a kernel of this cost takes by itself, in nanoseconds.
    pub fn kernel_ns(&self, cost: Cost) -> f64 {
        let flops_per_s = match cost.work {
            Work::Matrix => self.matrix_flops_per_s,
            Work::Vector => self.vector_flops_per_s,
        };
        // `max` drops a NaN, so a nonsensical cost takes the floor's time.
        let bytes_ns = cost.bytes / self.memory_bytes_per_s * 1e9;
        self.kernel_floor_ns.max(cost.flops / flops_per_s * 1e9).max(bytes_ns)
    }

    /// Work done per unit of time by a kernel while copies move bytes.
    pub(super) fn kernel_speed(&self, work: Work, moving: [bool; 2]) -> f64 {
        let slowdown = match work {
            Work::Matrix => self.matrix_slowdown,
            Work::Vector => self.vector_slowdown,
        };
        let mut time = 1.0;
        if moving[0] {
            time += slowdown.out;
        }
        if moving[1] {
            time += slowdown.back;
        }
        1.0 / time
    }

    /// Bytes per nanosecond of a device's two ways, before the host's own limit.
    pub(super) fn copy_speeds(&self, moving: [bool; 2]) -> [f64; 2] {
        let alone = [self.copy_out_bytes_per_s / 1e9, self.copy_in_bytes_per_s / 1e9];
        match moving {
            [true, true] => {
                let share = self.copy_both_bytes_per_s / 1e9 / (alone[0] + alone[1]);
                [alone[0] * share, alone[1] * share]
            }
            [out, back] => [if out { alone[0] } else { 0.0 }, if back { alone[1] } else { 0.0 }],
        }
    }
}
