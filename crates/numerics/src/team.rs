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
            if let Err(payload) = run {
                self.panicked.store(true, Ordering::Relaxed);
                // Dropping it could panic again, past the count of finished tasks.
                std::mem::forget(payload);
            }
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
pub struct Columns<'a, T = f32> {
    /// Row 0 of the matrix's column `first`.
    at: *mut T,
    rows: usize,
    width: usize,
    first: usize,
    range: Range<usize>,
    _borrow: PhantomData<&'a mut [T]>,
}

impl<'a, T: Copy> Columns<'a, T> {
    /// A buffer of rows of `range.len()` elements in the place of those columns of a matrix.
    pub fn of(buffer: &'a mut [T], range: Range<usize>) -> Columns<'a, T> {
        let width = range.len().max(1);
        Columns {
            at: buffer.as_mut_ptr(),
            rows: buffer.len() / width,
            width,
            first: range.start,
            range,
            _borrow: PhantomData,
        }
    }

    /// The columns of this task.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Rows of the matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// This task's part of a row.
    #[inline(always)]
    pub fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows);
        let at = row * self.width + self.range.start - self.first;
        // SAFETY: the row is inside the borrowed matrix and the range inside its width; these
        // columns belong to this task alone, and `&mut self` keeps its own borrows apart.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(at), self.range.len()) }
    }

    /// Writes `values` to columns `column ..` of row `row`, which must be this task's.
    #[inline(always)]
    pub fn put(&mut self, row: usize, column: usize, values: &[T]) {
        assert!(column >= self.range.start, "a column of another task");
        let column = column - self.range.start;
        self.row(row)[column..column + values.len()].copy_from_slice(values);
    }
}

impl<T: Copy> Columns<'_, T> {
    /// [`Columns::put`] of a number of values that the compiler knows.
    #[inline(always)]
    pub fn put_array<const N: usize>(&mut self, row: usize, column: usize, values: &[T; N]) {
        assert!(column >= self.range.start, "a column of another task");
        let column = column - self.range.start;
        if let Some(to) = self.row(row)[column..].first_chunk_mut() {
            *to = *values;
        } else {
            panic!("columns of another task");
        }
    }
}

/// A pointer that tasks may carry to other threads.
struct Shareable<T>(*mut T);

// SAFETY: only this module uses it, to give each task its own disjoint elements.
unsafe impl<T: Send> Sync for Shareable<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shareable<T> {}

/// A matrix whose columns tasks share.
pub struct Target<'a, T = f32> {
    at: Shareable<T>,
    rows: usize,
    width: usize,
    step: usize,
    _borrow: PhantomData<&'a mut ()>,
}

impl<'a, T> Target<'a, T> {
    /// Rows of `width` elements, to be filled `step` columns per task.
    pub fn new(out: &'a mut [T], width: usize, step: usize) -> Target<'a, T> {
        assert!(step > 0);
        let rows = out.len() / width.max(1);
        Target { at: Shareable(out.as_mut_ptr()), rows, width, step, _borrow: PhantomData }
    }

    /// Tasks that fill it.
    fn tasks(&self) -> usize {
        self.width.div_ceil(self.step)
    }
}

/// Data that splits into disjoint parts by rows.
pub trait SplitRows: Sync {
    /// The part of one task.
    type Part;

    /// The rows `range`.
    ///
    /// # Safety
    /// Ranges of parts that exist at the same time must be disjoint.
    unsafe fn part(&self, range: Range<usize>) -> Self::Part;
}

/// Rows of `width` elements, to be split among tasks.
pub struct RowsMut<'a, T> {
    at: Shareable<T>,
    rows: usize,
    width: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

/// Rows of `width` elements of a slice, to be split among tasks.
pub fn rows_mut<T: Send>(data: &mut [T], width: usize) -> RowsMut<'_, T> {
    let rows = data.len() / width.max(1);
    RowsMut { at: Shareable(data.as_mut_ptr()), rows, width, _borrow: PhantomData }
}

impl<'a, T: Send + Sync> SplitRows for RowsMut<'a, T> {
    type Part = &'a mut [T];

    unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.rows);
        let at = range.start * self.width;
        // SAFETY: inside the borrowed slice, as asserted; disjoint from other parts by contract.
        unsafe { std::slice::from_raw_parts_mut(self.at.0.add(at), range.len() * self.width) }
    }
}

macro_rules! split_tuple {
    ($($name:ident . $index:tt),*) => {
        impl<$($name: SplitRows),*> SplitRows for ($($name,)*) {
            type Part = ($($name::Part,)*);

            unsafe fn part(&self, range: Range<usize>) -> Self::Part {
                // SAFETY: the caller's promise, passed on.
                unsafe { ($(self.$index.part(range.clone()),)*) }
            }
        }
    };
}
split_tuple!(A.0, B.1);
split_tuple!(A.0, B.1, C.2);

impl Team {
    /// Fills a matrix of rows of `width` elements: one task per `step` columns, from the left.
    pub fn columns<T: Copy + Send>(
        &self,
        out: &mut [T],
        width: usize,
        step: usize,
        task: impl Fn(&mut Columns<'_, T>) + Sync,
    ) {
        self.columns_of(&mut [Target::new(out, width, step)], |_, columns| task(columns));
    }

    /// Fills several matrices in one job; tasks are told which one.
    pub fn columns_of<T: Copy + Send>(
        &self,
        targets: &mut [Target<'_, T>],
        task: impl Fn(usize, &mut Columns<'_, T>) + Sync,
    ) {
        let targets = &*targets;
        self.run(targets.iter().map(Target::tasks).sum(), |mut piece| {
            let mut at = 0;
            while piece >= targets[at].tasks() {
                piece -= targets[at].tasks();
                at += 1;
            }
            let Target { at: base, rows, width, step, .. } = &targets[at];
            let (rows, width) = (*rows, *width);
            let range = piece * step..((piece + 1) * step).min(width);
            let _borrow = PhantomData;
            task(at, &mut Columns { at: base.0, rows, width, first: 0, range, _borrow });
        });
    }

    /// Runs `task` over `rows` rows in pieces of at least `grain` rows, each with its part of
    /// `data`.
    pub fn rows<D: SplitRows>(
        &self,
        rows: usize,
        grain: usize,
        data: D,
        task: impl Fn(Range<usize>, D::Part) + Sync,
    ) {
        let step = self.step(rows, grain);
        self.run(rows.div_ceil(step), |piece| {
            let range = piece * step..((piece + 1) * step).min(rows);
            // SAFETY: each piece is run once, and pieces do not overlap.
            task(range.clone(), unsafe { data.part(range) });
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
    fn several_matrices_are_filled_in_one_job() {
        let team = Team::new(3).unwrap();
        let (mut a, mut b) = (vec![0; 2 * 50], vec![0; 2 * 7]);
        let mut targets = [Target::new(&mut a, 50, 16), Target::new(&mut b, 7, 4)];
        team.columns_of(&mut targets, |matrix, columns| {
            for row in 0..columns.rows() {
                let first = columns.range().start;
                for (at, value) in columns.row(row).iter_mut().enumerate() {
                    *value = 1000 * matrix + 100 * row + first + at;
                }
            }
        });
        assert!(a.iter().enumerate().all(|(i, v)| *v == 100 * (i / 50) + i % 50));
        assert!(b.iter().enumerate().all(|(i, v)| *v == 1000 + 100 * (i / 7) + i % 7));
    }

    #[test]
    fn every_row_is_given_to_one_task_in_all_its_parts() {
        let team = Team::new(3).unwrap();
        for rows in [0, 1, 5, 64] {
            let (mut a, mut b) = (vec![0; rows * 3], vec![0; rows]);
            team.rows(rows, 2, (rows_mut(&mut a, 3), rows_mut(&mut b, 1)), |range, (a, b)| {
                assert_eq!((a.len(), b.len()), (range.len() * 3, range.len()));
                a.fill(range.start + 1);
                b.iter_mut().zip(range).for_each(|(b, row)| *b += row);
            });
            assert!(a.iter().all(|v| *v > 0));
            assert!(b.iter().enumerate().all(|(i, v)| *v == i));
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
