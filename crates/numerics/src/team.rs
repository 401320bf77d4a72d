//! The thread team: a fork-join that costs microseconds and nothing while idle.
//!
//! Threads spin briefly for the next job, then park. A job is a number of tasks; each is run by
//! exactly one thread. Results must not depend on which thread runs a task.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, Thread};

use crate::fp_env;

/// Polls before a thread without work parks: about 50 microseconds.
const SPINS_BEFORE_PARK: u32 = 4_000;
/// Most threads of a team; more than any supported machine has cores.
pub const THREADS_MAX: usize = 1024;

type Task<'a> = dyn Fn(usize) + Sync + 'a;
/// A task of a job whose lifetime the types do not know; valid while the job has unfinished tasks.
type TaskPointer = *const Task<'static>;

struct Shared {
    /// Job number in the high half, index of the next unclaimed task in the low half.
    ticket: AtomicU64,
    /// Task count of the current job in the low half, its number in the high half.
    tasks: AtomicU64,
    /// Tasks of the current job that have returned.
    finished: AtomicUsize,
    /// The current job. Written only while no task of any job is unfinished.
    job: UnsafeCell<Option<TaskPointer>>,
    panicked: AtomicBool,
    stop: AtomicBool,
    parked: Box<[AtomicBool]>,
}

// SAFETY: `job` is written by the one thread inside `Team::run` while no task is claimed, and
// read only by threads that hold a claimed, unfinished task of that job.
unsafe impl Sync for Shared {}
// SAFETY: the job points to a `Sync` closure.
unsafe impl Send for Shared {}

impl Shared {
    /// Claims and runs one task of the current job; false when none is left.
    fn run_one(&self) -> bool {
        let tasks = self.tasks.load(Ordering::SeqCst);
        let ticket = self.ticket.load(Ordering::SeqCst);
        if ticket >> 32 != tasks >> 32 || ticket as u32 >= tasks as u32 {
            return false;
        }
        let claim =
            self.ticket.compare_exchange(ticket, ticket + 1, Ordering::AcqRel, Ordering::Relaxed);
        if claim.is_err() {
            return true;
        }
        // SAFETY: the claim succeeded, so the job numbered in the ticket has an unfinished task
        // (this one) and its caller waits for it: the closure is alive and not being replaced.
        let job = unsafe { *self.job.get() };
        if let Some(job) = job {
            // SAFETY: the claimed task is unfinished, so the closure is alive.
            let job = unsafe { &*job };
            let run = catch_unwind(AssertUnwindSafe(|| job(ticket as u32 as usize)));
            self.panicked.fetch_or(run.is_err(), Ordering::Relaxed);
        }
        self.finished.fetch_add(1, Ordering::Release);
        true
    }

    fn work(&self, index: usize) {
        fp_env::assert_default();
        let mut spins = 0;
        while !self.stop.load(Ordering::Relaxed) {
            if self.run_one() {
                spins = 0;
                continue;
            }
            spins += 1;
            if spins < SPINS_BEFORE_PARK {
                std::hint::spin_loop();
                continue;
            }
            self.parked[index].store(true, Ordering::SeqCst);
            // A job published before the flag was seen would not wake this thread: look again.
            if !self.run_one() && !self.stop.load(Ordering::SeqCst) {
                thread::park();
            }
            self.parked[index].store(false, Ordering::SeqCst);
            spins = 0;
        }
    }
}

/// A fixed number of threads, the caller of [`Team::run`] being one of them.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    wake: Vec<Thread>,
    running: Mutex<u32>,
}

impl Team {
    /// A team of `threads` threads (at least one, at most [`THREADS_MAX`]).
    pub fn new(threads: usize) -> std::io::Result<Team> {
        fp_env::assert_default();
        let helpers = threads.clamp(1, THREADS_MAX) - 1;
        let shared = Arc::new(Shared {
            ticket: AtomicU64::new(0),
            tasks: AtomicU64::new(0),
            finished: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            parked: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut team =
            Team { shared, workers: Vec::new(), wake: Vec::new(), running: Mutex::new(0) };
        for index in 0..helpers {
            let shared = team.shared.clone();
            let name = format!("coli-compute-{}", index + 1);
            let worker = thread::Builder::new().name(name).spawn(move || shared.work(index))?;
            team.wake.push(worker.thread().clone());
            team.workers.push(worker);
        }
        Ok(team)
    }

    /// Number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0) … task(count - 1)`, each once, and returns when all have returned. A call
    /// from inside a task, or while another thread's job runs, does the work on its own thread.
    ///
    /// # Panics
    /// When a task panicked.
    pub fn run(&self, count: usize, task: impl Fn(usize) + Sync) {
        assert!(count < u32::MAX as usize, "too many tasks");
        let job_guard =
            if count > 1 && !self.workers.is_empty() { self.running.try_lock().ok() } else { None };
        let Some(mut number) = job_guard else {
            (0..count).for_each(task);
            return;
        };
        *number = number.wrapping_add(1);
        let shared = &*self.shared;
        let job: *const Task<'_> = &task;
        // SAFETY: only the lifetime of the pointee changes. The pointer is followed by threads that
        // hold an unfinished task, and this function returns after every task has finished.
        let job: TaskPointer = unsafe { std::mem::transmute(job) };
        // SAFETY: the previous job's tasks have all finished and `running` keeps others out.
        unsafe { *shared.job.get() = Some(job) };
        shared.finished.store(0, Ordering::Relaxed);
        shared.tasks.store(u64::from(*number) << 32 | count as u64, Ordering::Relaxed);
        shared.ticket.store(u64::from(*number) << 32, Ordering::SeqCst);
        for (parked, thread) in shared.parked.iter().zip(&self.wake) {
            if parked.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
        while shared.run_one() {}
        let mut spins = 0u32;
        while shared.finished.load(Ordering::Acquire) < count {
            spins += 1;
            // Another thread still runs its task; give way to it when cores are scarce.
            if spins.is_multiple_of(1024) {
                thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        // Taken before the next job may start, so that each job reports its own panics.
        let panicked = shared.panicked.swap(false, Ordering::Relaxed);
        drop(number);
        assert!(!panicked, "a compute task panicked");
    }

    /// Items per task that give each thread about two tasks, as a multiple of `grain`.
    pub fn step(&self, len: usize, grain: usize) -> usize {
        let tasks = if self.threads() == 1 { 1 } else { 2 * self.threads() };
        len.div_ceil(grain).div_ceil(tasks).max(1) * grain
    }
}

/// The columns of a row-major matrix that one task owns and fills.
pub struct Columns<'a> {
    at: *mut f32,
    len: usize,
    width: usize,
    range: Range<usize>,
    _borrow: PhantomData<&'a mut [f32]>,
}

impl Columns<'_> {
    /// The columns of this task.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Writes `values` to columns `column ..` of row `row`, which must be this task's.
    #[inline(always)]
    pub fn put(&mut self, row: usize, column: usize, values: &[f32]) {
        assert!(row < self.len / self.width && values.len() <= self.width);
        let (at, end) = (row * self.width + column, column + values.len());
        assert!(
            column >= self.range.start && end <= self.range.end && at + values.len() <= self.len
        );
        // SAFETY: the range is inside the borrowed matrix; its columns belong to this task alone,
        // and `&mut self` keeps its own writes apart.
        unsafe { self.at.add(at).copy_from_nonoverlapping(values.as_ptr(), values.len()) }
    }
}

/// A pointer that tasks may carry to other threads.
struct Shareable(*mut f32);

// SAFETY: only `Team::columns` uses it, to give each task its own disjoint columns.
unsafe impl Sync for Shareable {}

impl Team {
    /// Fills a matrix of rows of `width` numbers: one task per `step` columns, from the left.
    pub fn columns(
        &self,
        out: &mut [f32],
        width: usize,
        step: usize,
        task: impl Fn(&mut Columns<'_>) + Sync,
    ) {
        assert!(step > 0);
        let (base, len) = (Shareable(out.as_mut_ptr()), out.len());
        let base = &base;
        self.run(width.div_ceil(step), |piece| {
            let range = piece * step..((piece + 1) * step).min(width);
            task(&mut Columns { at: base.0, len, width, range, _borrow: PhantomData });
        });
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for thread in &self.wake {
            thread.unpark();
        }
        for worker in self.workers.drain(..) {
            // A worker only ends by returning; its panics are caught and passed on in `run`.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_exactly_once() {
        for threads in [1, 2, 3, 8] {
            let team = Team::new(threads).unwrap();
            for round in 0..500 {
                let count = round % 37;
                let runs: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                team.run(count, |i| {
                    runs[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|r| r.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn nested_and_concurrent_jobs_finish() {
        let team = Team::new(3).unwrap();
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        team.run(5, |_| {
                            team.run(3, |_| {
                                total.fetch_add(1, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 4 * 50 * 15);
    }

    #[test]
    fn every_column_is_filled_by_one_task() {
        let team = Team::new(3).unwrap();
        for width in [1, 15, 16, 17, 100, 1000] {
            let mut out = vec![0.0; 3 * width];
            team.columns(&mut out, width, team.step(width, 16), |columns| {
                assert!(columns.range().start.is_multiple_of(16));
                for row in 0..3 {
                    for column in columns.range() {
                        columns.put(row, column, &[(row * width + column) as f32]);
                    }
                }
            });
            assert!(out.iter().enumerate().all(|(i, v)| *v == i as f32), "width {width}");
        }
    }

    #[test]
    #[should_panic(expected = "a compute task panicked")]
    fn a_task_cannot_write_the_columns_of_another() {
        let team = Team::new(2).unwrap();
        team.columns(&mut [0.0; 8], 8, 4, |columns| columns.put(0, 3, &[1.0, 2.0]));
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new(2).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| team.run(8, |i| assert_ne!(i, 5))));
        assert!(caught.is_err());
        let runs = AtomicUsize::new(0);
        team.run(8, |_| {
            runs.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(runs.into_inner(), 8);
    }
}
