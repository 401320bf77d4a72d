//! Progress bars on stderr, only where a person sees them.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Work shorter than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(2);

/// A bar that appears when its work takes longer than two seconds.
pub struct Progress {
    what: &'static str,
    bytes: bool,
    started: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Progress in bytes.
    pub fn bytes(what: &'static str) -> Progress {
        Progress { what, bytes: true, started: Instant::now(), bar: None }
    }

    /// Progress in things.
    pub fn count(what: &'static str) -> Progress {
        Progress { what, bytes: false, started: Instant::now(), bar: None }
    }

    /// Shows `done` of `total`.
    pub fn set(&mut self, done: u64, total: u64) {
        if self.bar.is_none() && self.started.elapsed() > PATIENCE && done < total {
            let template = if self.bytes {
                "{msg} [{bar:28}] {bytes}/{total_bytes} {bytes_per_sec}, {eta} left"
            } else {
                "{msg} [{bar:28}] {pos}/{len}, {eta} left"
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
