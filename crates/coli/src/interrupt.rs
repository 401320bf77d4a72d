//! Ctrl-C: the first one asks the running answer to stop, a second one ends the process.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

static ASKED: AtomicBool = AtomicBool::new(false);

/// Starts to listen. Safe to call more than once.
pub fn listen() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        // Without a handler Ctrl-C ends the process as usual.
        let _ = ctrlc::set_handler(|| {
            if ASKED.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
        });
    });
}

/// Whether a stop was asked for since the last [`clear`].
pub fn asked() -> bool {
    ASKED.load(Ordering::SeqCst)
}

/// Forgets an earlier stop.
pub fn clear() {
    ASKED.store(false, Ordering::SeqCst);
}
