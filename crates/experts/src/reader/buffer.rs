//! Bytes on page boundaries, as direct reads need them.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Alignment of the start and length of a buffer's memory, in bytes.
pub const PAGE_BYTES: usize = 4096;

/// A zeroed buffer on whole pages. Its memory is the length rounded up to pages.
pub struct PageBuffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer owns its memory alone, and bytes may be used from any thread.
unsafe impl Send for PageBuffer {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for PageBuffer {}

impl PageBuffer {
    /// At least `len` zero bytes, rounded up to whole pages.
    pub fn zeroed(len: usize) -> PageBuffer {
        let Some(layout) = Self::layout(len) else { return PageBuffer::default() };
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        PageBuffer { start, len: layout.size() }
    }

    /// Makes the buffer hold at least `len` bytes, whatever was in it. A smaller one is given back
    /// first, so that there are never two.
    pub fn grow_to(&mut self, len: usize) {
        if self.len < len {
            *self = PageBuffer::default();
            *self = PageBuffer::zeroed(len);
        }
    }

    /// Bytes of a buffer for `len` bytes.
    pub fn bytes_for(len: usize) -> usize {
        len.checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX)
    }

    /// `None` for no bytes; lengths that cannot be addressed panic, they were checked before.
    fn layout(len: usize) -> Option<Layout> {
        let len = Self::bytes_for(len);
        match Layout::from_size_align(len, PAGE_BYTES) {
            Ok(layout) => (len > 0).then_some(layout),
            Err(_) => panic!("a buffer of {len} bytes cannot be addressed"),
        }
    }
}

impl Default for PageBuffer {
    fn default() -> Self {
        PageBuffer { start: NonNull::dangling(), len: 0 }
    }
}

impl Drop for PageBuffer {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.len) {
            // SAFETY: allocated with this layout, which the length determines, and not freed yet.
            unsafe { dealloc(self.start.as_ptr(), layout) };
        }
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes from `start` on, or none at a dangling address.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for PageBuffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for PageBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageBuffer({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zero_on_whole_pages_and_may_be_empty() {
        assert!(PageBuffer::zeroed(0).is_empty());
        let mut buffer = PageBuffer::zeroed(PAGE_BYTES + 1);
        assert_eq!(buffer.len(), 2 * PAGE_BYTES);
        assert_eq!(buffer.as_ptr().addr() % PAGE_BYTES, 0);
        assert!(buffer.iter().all(|byte| *byte == 0));
        buffer.fill(7);
        assert!(buffer.iter().all(|byte| *byte == 7));
    }
}
