//! Experts computed where they lie in mapped files: no copy, no cache but the system's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use formats::ExpertRef;

use crate::load::{ExpertSource, ExpertTable, LoadError, verify};
use crate::local::StartError;
use crate::reader::{FileSet, MappedFiles};
use crate::store::ExpertStore;

/// The experts of a model in its mapped files.
pub(crate) struct MappedExperts {
    store: ExpertStore,
    files: MappedFiles,
    /// Whether an expert's bytes were found to be right, by layer.
    verified: Vec<Vec<AtomicU8>>,
    selections: AtomicU64,
}

/// An expert's bytes in mapped files; `None` where they do not lie as in memory.
fn bytes_in<'a>(files: &'a MappedFiles, source: &ExpertSource) -> Option<&'a [u8]> {
    let place = source.in_place()?;
    files.bytes(place.file, place.offset, place.len as usize)
}

impl MappedExperts {
    /// Maps the files; refused when an expert does not lie in them as it is computed.
    pub fn new(store: ExpertStore, files: &FileSet) -> Result<MappedExperts, StartError> {
        let files = MappedFiles::open(files).map_err(StartError::Map)?;
        let table = store.table();
        for key in table.keys() {
            if bytes_in(&files, table.expert(key)).is_none() {
                let what = format!("expert {} of layer {}", key.1, key.0);
                return Err(StartError::NotInPlace { what });
            }
        }
        let layers = (0..table.layers()).map(|layer| table.places(layer));
        let verified = layers.map(|experts| (0..experts).map(|_| AtomicU8::new(0)).collect());
        let verified = verified.collect();
        Ok(MappedExperts { store, files, verified, selections: AtomicU64::new(0) })
    }

    /// The experts.
    pub fn table(&self) -> &ExpertTable {
        self.store.table()
    }

    /// Bytes mapped.
    pub fn len_bytes(&self) -> u64 {
        self.files.len_bytes()
    }

    /// Experts that were asked for.
    pub fn selections(&self) -> u64 {
        self.selections.load(Ordering::Relaxed)
    }

    fn bytes(&self, layer: usize, expert: u32) -> &[u8] {
        let source = self.store.table().expert((layer as u32, expert));
        bytes_in(&self.files, source).unwrap_or_else(|| panic!("expert {expert} is not mapped"))
    }

    /// Checks an expert's bytes the first time it is asked for.
    pub fn verify(&self, layer: usize, expert: u32) -> Result<(), Arc<LoadError>> {
        self.selections.fetch_add(1, Ordering::Relaxed);
        let verified = &self.verified[layer][expert as usize];
        if verified.load(Ordering::Relaxed) == 0 {
            let source = self.store.table().expert((layer as u32, expert));
            let key = (layer as u32, expert);
            verify(self.store.reader(), key, source, self.bytes(layer, expert))?;
            verified.store(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// An expert's matrices.
    pub fn view(&self, layer: usize, expert: u32) -> ExpertRef<'_> {
        let source = self.store.table().expert((layer as u32, expert));
        source.desc.view(self.bytes(layer, expert))
    }
}
