//! The bundled model: in a checkout above the current directory, else unpacked once from the
//! binary into the user's data directory.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::failure::Failure;

/// Where a checkout keeps it.
const IN_CHECKOUT: &str = "models/hummingbird";

/// The directory of the bundled model, looked for once per process: outside a checkout every look
/// reads and hashes the unpacked files.
pub fn find() -> Result<PathBuf, Failure> {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(found.clone());
    }
    let found = search()?;
    Ok(FOUND.get_or_init(|| found).clone())
}

fn search() -> Result<PathBuf, Failure> {
    if let Ok(here) = env::current_dir() {
        for dir in here.ancestors() {
            let found = dir.join(IN_CHECKOUT);
            if found.join("config.json").is_file() {
                return Ok(found);
            }
        }
    }
    unpack()
}

/// Whether a directory holds the bundled model, in a checkout or unpacked.
pub fn is_bundled(dir: &Path) -> bool {
    dir.ends_with(IN_CHECKOUT) || is_embedded(dir)
}

#[cfg(not(feature = "bundled-model"))]
fn is_embedded(_dir: &Path) -> bool {
    false
}

#[cfg(feature = "bundled-model")]
fn is_embedded(dir: &Path) -> bool {
    embedded::is_copy(dir)
}

#[cfg(not(feature = "bundled-model"))]
fn unpack() -> Result<PathBuf, Failure> {
    Err(Failure::usage(
        "no model: give --model DIR or set COLI_MODEL (this build carries no bundled model)",
    ))
}

#[cfg(feature = "bundled-model")]
fn unpack() -> Result<PathBuf, Failure> {
    embedded::unpack()
}

#[cfg(feature = "bundled-model")]
mod embedded {
    use std::fs;
    use std::path::{Path, PathBuf};

    use anyhow::Context;
    use lab::manifest::{FileRecord, MANIFEST_FILE, Manifest, record};

    use crate::failure::Failure;

    macro_rules! file {
        ($name:literal) => {
            ($name, include_bytes!(concat!("../../../models/hummingbird/", $name)).as_slice())
        };
    }

    /// The files of the model.
    const FILES: [(&str, &[u8]); 7] = [
        file!("config.json"),
        file!("generation_config.json"),
        file!("tokenizer.json"),
        file!("tokenizer_config.json"),
        file!("colibri.json"),
        file!("README.md"),
        file!("model.safetensors"),
    ];

    /// The user's data directory.
    fn data_dir() -> Result<PathBuf, Failure> {
        let absolute =
            |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
        if let Some(dir) = absolute("XDG_DATA_HOME") {
            return Ok(dir.join("colibri"));
        }
        if let Some(dir) = absolute("LOCALAPPDATA") {
            return Ok(dir.join("colibri"));
        }
        absolute("HOME").map(|home| home.join(".local/share/colibri")).ok_or_else(|| {
            Failure::usage("no model: give --model DIR (there is no home directory to unpack the bundled one into)")
        })
    }

    /// The manifest among the files: it has the hashes of all that matter.
    fn manifest() -> &'static [u8] {
        FILES.iter().find(|(name, _)| *name == MANIFEST_FILE).map_or(&[], |(_, bytes)| *bytes)
    }

    /// Whether a directory's manifest is the embedded one's: a copy, intact or not.
    pub fn is_copy(dir: &Path) -> bool {
        let path = dir.join(MANIFEST_FILE);
        let bytes = manifest();
        fs::metadata(&path).is_ok_and(|facts| facts.len() == bytes.len() as u64)
            && fs::read(&path).is_ok_and(|found| found == bytes)
    }

    /// Whether a directory holds the embedded model. Its files are compared with the manifest's
    /// hashes, so that the embedded weights are not read into memory for it.
    fn is_intact(dir: &Path) -> bool {
        let same_manifest =
            fs::read(dir.join(MANIFEST_FILE)).is_ok_and(|found| found == manifest());
        let Ok(Some(manifest)) = Manifest::load(dir) else { return false };
        let intact = |file: &FileRecord| record(dir, &file.name).is_ok_and(|found| found == *file);
        same_manifest && manifest.files.iter().all(intact)
    }

    /// Unpacks the model if it is not there, and returns its directory.
    pub fn unpack() -> Result<PathBuf, Failure> {
        let version = &blake3::hash(manifest()).to_hex()[..12];
        let models = data_dir()?.join("models").join(version);
        let dir = models.join("hummingbird");
        if is_intact(&dir) {
            return Ok(dir);
        }
        // Another process may do the same: each writes its own directory, the first rename wins.
        let temporary = models.join(format!("hummingbird.{}.tmp", std::process::id()));
        let write = || -> anyhow::Result<()> {
            fs::create_dir_all(&temporary)?;
            for (name, bytes) in FILES {
                fs::write(temporary.join(name), bytes)?;
            }
            if fs::rename(&temporary, &dir).is_err() {
                if !is_intact(&dir) {
                    let _ = fs::remove_dir_all(&dir);
                    fs::rename(&temporary, &dir)?;
                } else {
                    fs::remove_dir_all(&temporary)?;
                }
            }
            Ok(())
        };
        write()
            .with_context(|| {
                format!(
                    "cannot unpack the bundled model into {}; give --model DIR",
                    models.display()
                )
            })
            .map_err(|error| Failure::Failed(anyhow::anyhow!("{error:#}")))?;
        note!("Unpacked the bundled model into {}", dir.display());
        Ok(dir)
    }
}
