//! Buffers that are used again: a decoded token takes its working memory from here and gives it
//! back, so that nothing is allocated per token.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes kept unless told otherwise.
const KEPT_BYTES: usize = 64 << 20;

/// Free buffers of one element type.
#[derive(Default)]
pub struct Pool<T> {
    free: Mutex<Vec<Vec<T>>>,
}

/// Bytes of free buffers, all element types together, and how many may be kept.
struct Kept {
    bytes: AtomicUsize,
    limit: AtomicUsize,
}

/// Buffers of every element type that steps use.
#[derive(Clone)]
pub struct Scratch {
    kept: Arc<Kept>,
    f32: Arc<Pool<f32>>,
    i8: Arc<Pool<i8>>,
    i32: Arc<Pool<i32>>,
    u32: Arc<Pool<u32>>,
    i64: Arc<Pool<i64>>,
}

/// An element type of [`Scratch`].
pub trait Element: Copy + Default + Send + Sync + 'static {
    /// Its pool.
    fn pool(scratch: &Scratch) -> &Arc<Pool<Self>>;
}

macro_rules! element {
    ($($name:ident),*) => {$(
        impl Element for $name {
            fn pool(scratch: &Scratch) -> &Arc<Pool<$name>> {
                &scratch.$name
            }
        }
    )*};
}
element!(f32, i8, i32, u32, i64);

/// A buffer on loan; it goes back when dropped.
pub struct Buf<T: Element> {
    /// At least `len` elements.
    data: Vec<T>,
    len: usize,
    home: Option<Scratch>,
}

impl Default for Scratch {
    fn default() -> Scratch {
        let kept = Kept { bytes: AtomicUsize::new(0), limit: AtomicUsize::new(KEPT_BYTES) };
        Scratch {
            kept: Arc::new(kept),
            f32: Arc::default(),
            i8: Arc::default(),
            i32: Arc::default(),
            u32: Arc::default(),
            i64: Arc::default(),
        }
    }
}

impl Scratch {
    /// Sets how many bytes of free buffers are kept from now on.
    pub fn keep(&self, bytes: usize) {
        self.kept.limit.store(bytes, Ordering::Relaxed);
    }

    /// A buffer of `len` zeros.
    pub fn zeroed<T: Element>(&self, len: usize) -> Buf<T> {
        match self.take(len) {
            Some(mut data) => {
                data[..len].fill(T::default());
                Buf { data, len, home: Some(self.clone()) }
            }
            None => self.new_buf(len),
        }
    }

    /// A buffer of `len` elements to be written before they are read: they hold anything.
    pub fn filled_later<T: Element>(&self, len: usize) -> Buf<T> {
        match self.take(len) {
            Some(data) => Buf { data, len, home: Some(self.clone()) },
            None => self.new_buf(len),
        }
    }

    /// A copy of a slice.
    pub fn copy<T: Element>(&self, from: &[T]) -> Buf<T> {
        let mut copy = self.filled_later(from.len());
        copy.copy_from_slice(from);
        copy
    }

    /// A new buffer of zeros.
    fn new_buf<T: Element>(&self, len: usize) -> Buf<T> {
        Buf { data: vec![T::default(); size_class(len)], len, home: Some(self.clone()) }
    }

    /// The smallest free buffer that holds `len` elements and not far more.
    fn take<T: Element>(&self, len: usize) -> Option<Vec<T>> {
        let mut free = T::pool(self).free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |buffer: &Vec<T>| (len..=2 * size_class(len)).contains(&buffer.len());
        let (at, _) = free
            .iter()
            .enumerate()
            .filter(|(_, buffer)| fits(buffer))
            .min_by_key(|(_, buffer)| buffer.len())?;
        let buffer = free.remove(at);
        self.kept.bytes.fetch_sub(buffer.len() * size_of::<T>(), Ordering::Relaxed);
        Some(buffer)
    }

    /// Keeps a buffer; those that waited longest make room for it.
    fn give<T: Element>(&self, buffer: Vec<T>) {
        let bytes = buffer.len() * size_of::<T>();
        let limit = self.kept.limit.load(Ordering::Relaxed);
        if bytes == 0 || bytes > limit {
            return;
        }
        let mut free = T::pool(self).free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut kept = self.kept.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        while kept > limit && !free.is_empty() {
            let freed = free.remove(0).len() * size_of::<T>();
            kept = self.kept.bytes.fetch_sub(freed, Ordering::Relaxed) - freed;
        }
        if kept > limit {
            // The room is taken by buffers of other types.
            self.kept.bytes.fetch_sub(bytes, Ordering::Relaxed);
            return;
        }
        free.push(buffer);
    }
}

/// Elements to allocate for `len`: at most an eighth more, so that lengths that grow slowly, such
/// as those that follow the context, find their buffer again.
fn size_class(len: usize) -> usize {
    len.next_multiple_of((len.next_power_of_two() / 16).max(64))
}

impl<T: Element> From<Vec<T>> for Buf<T> {
    /// A buffer that belongs to no pool.
    fn from(data: Vec<T>) -> Buf<T> {
        Buf { len: data.len(), data, home: None }
    }
}

impl<T: Element> Drop for Buf<T> {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            home.give(std::mem::take(&mut self.data));
        }
    }
}

impl<T: Element> Deref for Buf<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.data[..self.len]
    }
}

impl<T: Element> DerefMut for Buf<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data[..self.len]
    }
}

impl<T: Element> Default for Buf<T> {
    fn default() -> Self {
        Buf { data: Vec::new(), len: 0, home: None }
    }
}

impl<T: Element + std::fmt::Debug> std::fmt::Debug for Buf<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self[..].fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_given_back_is_used_again_and_comes_zeroed() {
        let scratch = Scratch::default();
        let mut first = scratch.zeroed::<f32>(1000);
        first.fill(7.0);
        let address = first.as_ptr();
        drop(first);
        let second = scratch.zeroed::<f32>(900);
        assert_eq!(second.as_ptr(), address);
        assert_eq!(second.len(), 900);
        assert!(second.iter().all(|v| *v == 0.0));
        let copy = scratch.copy(&[1i64, 2, 3]);
        assert_eq!(*copy, [1, 2, 3]);
    }

    #[test]
    fn what_exceeds_the_limit_is_freed_and_the_oldest_first() {
        let scratch = Scratch::default();
        scratch.keep(2048);
        drop(scratch.zeroed::<i8>(2049));
        assert_eq!(scratch.kept.bytes.load(Ordering::Relaxed), 0);
        let many: Vec<_> = (0..10).map(|_| scratch.zeroed::<i64>(64)).collect();
        drop(many);
        assert_eq!(scratch.kept.bytes.load(Ordering::Relaxed), 4 * 512);
        drop(scratch.zeroed::<i64>(200));
        let free = scratch.i64.free.lock().unwrap();
        assert_eq!(free.iter().map(Vec::len).collect::<Vec<_>>(), [256]);
        assert_eq!(scratch.kept.bytes.load(Ordering::Relaxed), 2048);
    }

    #[test]
    fn a_length_that_grows_slowly_finds_its_buffer_again() {
        let scratch = Scratch::default();
        for len in 10_000..10_100 {
            drop(scratch.filled_later::<f32>(len));
        }
        assert!(scratch.f32.free.lock().unwrap().len() <= 2);
    }

    #[test]
    fn a_small_request_does_not_take_a_large_buffer() {
        let scratch = Scratch::default();
        drop(scratch.zeroed::<f32>(1000));
        let small = scratch.zeroed::<f32>(10);
        assert!(small.data.len() < 1000);
        assert_eq!(scratch.filled_later::<f32>(999).len(), 999);
    }
}
