//! Progress bars on stderr, only where a person sees them.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Work shorter than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a bar counts.
#[derive(Clone, Copy)]
enum Unit {
    Bytes,
    Count,
    Share,
}

/// A bar that appears when its work takes longer than two seconds.
pub struct Progress {
    what: &'static str,
    unit: Unit,
    started: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Progress in bytes.
    pub fn bytes(what: &'static str) -> Progress {
        Progress { what, unit: Unit::Bytes, started: Instant::now(), bar: None }
    }

    /// Progress in things.
    pub fn count(what: &'static str) -> Progress {
        Progress { what, unit: Unit::Count, started: Instant::now(), bar: None }
    }

    /// Progress as a share of the whole.
    pub fn share(what: &'static str) -> Progress {
        Progress { what, unit: Unit::Share, started: Instant::now(), bar: None }
    }

    /// Shows a share, from 0 to 1.
    pub fn set_share(&mut self, share: f64) {
        self.set((share * 1000.0) as u64, 1000);
    }

    /// Shows `done` of `total`.
    pub fn set(&mut self, done: u64, total: u64) {
        if self.bar.is_none() && self.started.elapsed() > PATIENCE && done < total {
            let template = match self.unit {
                Unit::Bytes => "{msg} [{bar:28}] {bytes}/{total_bytes} {bytes_per_sec}, {eta} left",
                Unit::Count => "{msg} [{bar:28}] {pos}/{len}, {eta} left",
                Unit::Share => "{msg} [{bar:28}] {percent} %, {eta} left",
            };
            let bar = ProgressBar::new(total)
                .with_message(self.what)
                .with_elapsed(self.started.elapsed());
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("=> "));
            }
            self.bar = Some(bar);
        }
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
