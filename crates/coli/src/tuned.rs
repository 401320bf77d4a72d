//! Settings that `coli tune` measured: kept per machine and model, taken where no flag says
//! otherwise.

use std::fmt;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context;
use experts::durable;
use lab::tune::{Settings, Tuned};
use runtime::engine::PREFILL_CHUNK;
use runtime::machine::Machine;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::history::state_dir;

/// Version of the file.
const VERSION: u32 = 1;
/// Bytes of a file that are read at most.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Largest difference of ceilings for which settings are taken as measured.
const RAM_DIFFERS_MAX: f64 = 0.25;

/// The settings of one machine and model.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    /// The model's directories.
    model: Vec<PathBuf>,
    /// BLAKE3 of its configuration.
    config: String,
    /// The machine.
    machine: String,
    /// The ceiling under which it was measured.
    ram_bytes: u64,
    settings: Settings,
}

/// Settings found for a model, and where.
pub struct Found {
    /// The settings; those that depend on the ceiling are left out where it differs.
    pub settings: Settings,
    /// The ceiling under which they were measured.
    pub ram_bytes: u64,
}

/// Canonical directories of a model; `None` where one cannot be resolved.
fn canonical(dirs: &[PathBuf]) -> Option<Vec<PathBuf>> {
    dirs.iter().map(|dir| fs::canonicalize(dir).ok()).collect()
}

/// BLAKE3 of a model's configuration; empty where it cannot be read.
fn config_hash(dirs: &[PathBuf]) -> String {
    let mut hasher = blake3::Hasher::new();
    let read = dirs.first().map(|dir| File::open(dir.join("config.json")));
    match read.map(|file| file.and_then(|file| hasher.update_reader(file).map(|_| ()))) {
        Some(Ok(())) => hasher.finalize().to_hex().to_string(),
        _ => String::new(),
    }
}

/// Where the settings for a model are kept, if anywhere.
fn path_of(dirs: &[PathBuf]) -> Option<PathBuf> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(Machine::default().description().as_bytes());
    for dir in canonical(dirs)? {
        hasher.update(&[0]);
        hasher.update(dir.as_os_str().as_encoded_bytes());
    }
    let name = format!("{}.json", &hasher.finalize().to_hex()[..16]);
    Some(state_dir()?.join("colibri").join("tuned").join(name))
}

/// Keeps settings for a model; returns where.
pub fn store(dirs: &[PathBuf], tuned: &Tuned) -> Result<PathBuf, Failure> {
    let path = place(dirs)?;
    let stored = Stored {
        version: VERSION,
        model: canonical(dirs).unwrap_or_default(),
        config: config_hash(dirs),
        machine: Machine::default().description(),
        ram_bytes: tuned.ram_bytes,
        settings: tuned.settings.clone(),
    };
    let text = serde_json::to_vec_pretty(&stored).map_err(|error| not_kept(error.into()))?;
    durable::write(&path, &text).map_err(|error| not_kept(error.into()))?;
    Ok(path)
}

fn not_kept(error: anyhow::Error) -> Failure {
    Failure::Failed(anyhow::anyhow!("settings are not kept: {error:#}"))
}

/// Where the settings for a model are to be kept.
fn place(dirs: &[PathBuf]) -> Result<PathBuf, Failure> {
    let nowhere =
        "there is no place to keep settings; set XDG_STATE_HOME or HOME, or give --dry-run";
    path_of(dirs).ok_or_else(|| Failure::usage(nowhere))
}

/// Makes the place where settings for a model are to be kept.
pub fn prepare(dirs: &[PathBuf]) -> Result<(), Failure> {
    let path = place(dirs)?;
    let Some(dir) = path.parent() else { return Ok(()) };
    let made = fs::create_dir_all(dir).with_context(|| dir.display().to_string());
    made.map_err(not_kept)
}

/// Forgets the settings for a model; returns the file, if there was one.
pub fn forget(dirs: &[PathBuf]) -> Result<Option<PathBuf>, Failure> {
    let Some(path) = path_of(dirs) else { return Ok(None) };
    match fs::remove_file(&path) {
        Ok(()) => Ok(Some(path)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let path = path.display();
            Err(Failure::Failed(anyhow::anyhow!("settings are not forgotten: {path}: {error}")))
        }
    }
}

/// The settings for a model under a ceiling, if that is known. A file that cannot be used is said
/// and left alone.
pub fn find(dirs: &[PathBuf], ram: Option<u64>) -> Option<Found> {
    let path = path_of(dirs)?;
    let bytes = match durable::read(&path, FILE_BYTES_MAX) {
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        read => read,
    };
    let parsed = bytes.map_err(|error| error.to_string()).and_then(|bytes| parse(&bytes));
    match parsed {
        Ok(stored) if stored.config == config_hash(dirs) => Some(found(stored, ram)),
        Ok(_) => {
            warn(&path, "measured with another configuration of this model");
            None
        }
        Err(why) => {
            warn(&path, &why);
            None
        }
    }
}

fn warn(path: &Path, why: &str) {
    note!(
        "warning: {}: {why}; its settings are not used, give coli tune again or coli tune --forget",
        path.display()
    );
}

fn parse(bytes: &[u8]) -> Result<Stored, String> {
    let stored: Stored = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let settings = &stored.settings;
    let sound = stored.version == VERSION
        && (1..=numerics::team::THREADS_MAX).contains(&settings.threads)
        && settings.prefill_chunk > 0;
    if sound { Ok(stored) } else { Err("values that this version does not know".to_owned()) }
}

fn found(stored: Stored, ram: Option<u64>) -> Found {
    let measured = stored.ram_bytes as f64;
    let alike = ram.is_none_or(|ram| (ram as f64 - measured).abs() <= RAM_DIFFERS_MAX * measured);
    let mut settings = stored.settings;
    if !alike {
        (settings.io, settings.prefetch) = (None, None);
        settings.prefill_chunk = settings.prefill_chunk.min(PREFILL_CHUNK);
    }
    Found { settings, ram_bytes: stored.ram_bytes }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.settings)?;
        write!(f, " (measured with --ram {:.2})", self.ram_bytes as f64 / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use experts::IoMode;

    use super::*;

    fn stored(change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
        let mut value = serde_json::json!({
            "version": 1, "model": ["/m"], "config": "", "machine": "m", "ram_bytes": 1000,
            "settings": {"threads": 2, "prefill_chunk": 256, "io": "uring", "prefetch": false},
        });
        change(&mut value);
        serde_json::to_vec(&value).unwrap()
    }

    #[test]
    fn settings_that_depend_on_the_ceiling_are_left_out_where_it_differs() {
        let settings = |ram| {
            let stored = parse(&stored(|_| {})).unwrap();
            found(stored, ram).settings
        };
        let all = Settings {
            threads: 2,
            prefill_chunk: 256,
            io: Some(IoMode::Uring),
            prefetch: Some(false),
        };
        assert_eq!(settings(None), all);
        assert_eq!(settings(Some(1200)), all);
        assert_eq!(settings(Some(2000)), Settings { io: None, prefetch: None, ..all });
    }

    #[test]
    fn what_is_not_a_settings_file_is_refused() {
        for (name, value) in [
            ("/version", serde_json::json!(2)),
            ("/settings/threads", serde_json::json!(0)),
            ("/settings/threads", serde_json::json!(1_000_000_000)),
            ("/settings/prefill_chunk", serde_json::json!(0)),
            ("/settings/io", serde_json::json!("tape")),
            ("/settings/prefetch", serde_json::json!("pairs")),
            ("/settings", serde_json::json!(1)),
        ] {
            let changed = stored(|stored| *stored.pointer_mut(name).unwrap() = value);
            assert!(parse(&changed).is_err(), "{name}");
        }
        assert!(parse(b"").is_err() && parse(b"[]").is_err());
    }
}
