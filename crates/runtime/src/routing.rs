//! What the routers chose, counted for the history and written to a trace.

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use experts::{Route, TraceWriter, Usage, UsageShape};
use models::RouteObserver;

/// A trace that is being written.
struct TraceFile {
    path: PathBuf,
    writer: TraceWriter<BufWriter<File>>,
    calls: u64,
    /// The first failure; nothing is written after it.
    failure: Option<io::Error>,
}

/// Counts choices per layer and expert, and writes a trace if asked to.
pub struct RouteLog {
    shape: UsageShape,
    /// `[layers + 1, experts]`.
    counts: Vec<AtomicU64>,
    trace: Option<Mutex<TraceFile>>,
}

/// A trace that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{}: the route trace cannot be written: {source}", path.display())]
pub struct TraceError {
    /// The file.
    pub path: PathBuf,
    /// The system's answer.
    #[source]
    pub source: io::Error,
}

impl RouteLog {
    /// A log of a model; `trace` is created and overwritten.
    pub fn new(shape: UsageShape, trace: Option<PathBuf>) -> Result<RouteLog, TraceError> {
        let open = |path: PathBuf| match File::create(&path) {
            Ok(file) => {
                let writer = TraceWriter::new(BufWriter::new(file));
                Ok(Mutex::new(TraceFile { path, writer, calls: 0, failure: None }))
            }
            Err(source) => Err(TraceError { path, source }),
        };
        let counts = (shape.layers + 1) * shape.experts;
        Ok(RouteLog {
            shape,
            counts: (0..counts).map(|_| AtomicU64::new(0)).collect(),
            trace: trace.map(open).transpose()?,
        })
    }

    /// Bytes that the log of a model takes.
    pub fn bytes_of(shape: UsageShape) -> u64 {
        ((shape.layers + 1) * shape.experts * size_of::<AtomicU64>()) as u64
    }

    /// Choices since the last call.
    pub fn take_usage(&self) -> Usage {
        let mut usage = Usage::empty(self.shape);
        for (at, count) in self.counts.iter().enumerate() {
            let count = count.swap(0, Ordering::Relaxed);
            usage.add(at / self.shape.experts, at % self.shape.experts, count);
        }
        usage
    }

    /// Hands the trace to the system; the first failure of writing it, once.
    pub fn flush_trace(&self) -> Result<(), TraceError> {
        let Some(trace) = &self.trace else { return Ok(()) };
        let mut trace = lock(trace);
        let flushed = match trace.failure.take() {
            Some(failure) => Err(failure),
            None => trace.writer.flush(),
        };
        flushed.map_err(|source| TraceError { path: trace.path.clone(), source })
    }
}

fn lock(trace: &Mutex<TraceFile>) -> MutexGuard<'_, TraceFile> {
    trace.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RouteObserver for RouteLog {
    fn routed(&self, layer: usize, routes: &[Route], top_k: usize) {
        let row = layer * self.shape.experts;
        for route in routes {
            if let Some(count) = self.counts.get(row + route.expert as usize) {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
        let Some(trace) = &self.trace else { return };
        let trace = &mut *lock(trace);
        for (row, routes) in routes.chunks_exact(top_k.max(1)).enumerate() {
            if trace.failure.is_some() {
                return;
            }
            let chosen = routes.iter().map(|route| (route.expert, route.weight));
            trace.failure = trace.writer.row(trace.calls, row as u32, layer, chosen).err();
        }
        trace.calls += 1;
    }
}
