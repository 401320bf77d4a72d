//! The history of routed experts: where it lives, what it does to the cache, when it is written.

use std::env;
use std::path::{Path, PathBuf};

use container::Model;
use experts::usage::{Origin, Problems, history_path, merge, model_id};
use experts::{Usage, pins};
use runtime::Engine;
use runtime::engine::usage_shape;

use crate::args::{EngineArgs, Pin};
use crate::bundled;
use crate::failure::Failure;
use crate::output;

/// The history of an opened model.
pub struct History {
    /// Where it is kept; `None` where there is no place for it.
    path: Option<PathBuf>,
    write: bool,
}

/// The user's directory for the state of programs.
pub fn state_dir() -> Option<PathBuf> {
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    absolute("XDG_STATE_HOME")
        .or_else(|| absolute("LOCALAPPDATA"))
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
}

/// Where the history of a model is kept, if anywhere.
pub fn path_of(model: &Model) -> Result<Option<PathBuf>, Failure> {
    let Some(primary) = model.dirs.first() else { return Ok(None) };
    let (writable, is_bundled) = (is_writable(primary), bundled::is_bundled(primary));
    // The id names a history away from its model; finding it looks at every tensor.
    let beside = writable && !is_bundled;
    let id = if beside { String::new() } else { model_id(&model.table_hash()?) };
    Ok(history_path(primary, writable, is_bundled, state_dir().as_deref(), &id))
}

#[cfg(unix)]
fn is_writable(dir: &Path) -> bool {
    rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).is_ok()
}

#[cfg(not(unix))]
fn is_writable(dir: &Path) -> bool {
    std::fs::metadata(dir).is_ok_and(|facts| !facts.permissions().readonly())
}

/// Says which records of a history were left out.
fn report(path: &Path, problems: &Problems) {
    for problem in &problems.listed {
        note!("warning: {}: {problem}", path.display());
    }
    let more = problems.total - problems.listed.len();
    if more > 0 {
        note!("warning: {}: {more} more such lines", path.display());
    }
}

/// The history that the flags name for an engine's model, and where it is kept. A history that was
/// found and cannot be used is said and left alone.
pub fn load(args: &EngineArgs, model: &Model) -> Result<(Option<Usage>, Option<PathBuf>), Failure> {
    let path = match args.pin == Pin::Auto || !args.no_usage {
        true => path_of(model)?,
        false => None,
    };
    let shape = usage_shape(&model.config);
    let usage = match (&args.pin, &path) {
        (Pin::None, _) | (Pin::Auto, None) => None,
        (Pin::File(file), _) => {
            if !file.is_file() {
                let file = file.display();
                return Err(Failure::usage(format!("--pin {file}: there is no such file")));
            }
            let loaded = Usage::load(file, shape, Origin::Named);
            let (usage, problems) = loaded.map_err(|error| Failure::usage(error.to_string()))?;
            report(file, &problems);
            Some(usage)
        }
        (Pin::Auto, Some(path)) => match Usage::load(path, shape, Origin::Found) {
            Ok((usage, problems)) => {
                report(path, &problems);
                Some(usage)
            }
            Err(error) => {
                note!("warning: {error}");
                None
            }
        },
    };
    Ok((usage.filter(|usage| !usage.is_empty()), path))
}

impl History {
    /// Prepares an engine's cache by the history that the flags name.
    pub fn open(args: &EngineArgs, engine: &Engine) -> Result<History, Failure> {
        let (usage, path) = load(args, engine.model())?;
        if let (Some(usage), Some(cache)) = (usage, engine.experts().cache()) {
            let pinned = pins::prepare(cache, &usage, engine.config().moe.top_k);
            if pinned > 0 {
                let experts = output::counted(pinned, "expert");
                note!("{experts} to be kept in memory, by the history of earlier turns");
            }
        }
        Ok(History { path, write: !args.no_usage })
    }

    /// Adapts pins to the turn that ended, and adds it to the history.
    pub fn turn_done(&self, engine: &Engine) {
        if let Some(cache) = engine.experts().cache() {
            pins::exchange(cache);
        }
        let counted = engine.routes().take_usage();
        let Some(path) = self.path.as_ref().filter(|_| self.write) else { return };
        match merge(path, &counted) {
            Ok((_, problems)) => report(path, &problems),
            Err(error) => note!("warning: the history was not written: {error}"),
        }
    }
}
