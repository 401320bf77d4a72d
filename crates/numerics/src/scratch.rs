//! Buffers that are used again: a decoded token takes its working memory from here and gives it
//! back, so that nothing is allocated per token.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Largest buffer kept, in bytes. Larger ones belong to prefill, where an allocation is shared by
/// many tokens.
const KEPT_BYTES_MAX: usize = 2 << 20;
/// Most bytes kept of one element type.
const TOTAL_BYTES_MAX: usize = 8 << 20;

/// Bytes that a [`Scratch`] keeps at most.
pub const SCRATCH_BYTES_MAX: usize = 5 * TOTAL_BYTES_MAX;

/// Buffers of one element type.
#[derive(Default)]
pub struct Pool<T> {
    free: Mutex<Free<T>>,
}

#[derive(Default)]
struct Free<T> {
    buffers: Vec<Vec<T>>,
    bytes: usize,
}

/// Buffers of every element type that steps use.
#[derive(Clone, Default)]
pub struct Scratch {
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
    data: Vec<T>,
    home: Option<Arc<Pool<T>>>,
}

impl Scratch {
    /// A buffer of `len` zeros.
    pub fn zeroed<T: Element>(&self, len: usize) -> Buf<T> {
        let pool = T::pool(self);
        let mut data = pool.take(len);
        data.clear();
        data.resize(len, T::default());
        Buf { data, home: Some(pool.clone()) }
    }

    /// A copy of a slice.
    pub fn copy<T: Element>(&self, from: &[T]) -> Buf<T> {
        let pool = T::pool(self);
        let mut data = pool.take(from.len());
        data.clear();
        data.extend_from_slice(from);
        Buf { data, home: Some(pool.clone()) }
    }
}

impl<T: Element> Pool<T> {
    /// The smallest free buffer that holds `len` elements, or a new one.
    fn take(&self, len: usize) -> Vec<T> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = free.buffers.iter().enumerate().filter(|(_, buffer)| buffer.capacity() >= len);
        let best = fits.min_by_key(|(_, buffer)| buffer.capacity()).map(|(at, _)| at);
        match best {
            Some(at) => {
                let buffer = free.buffers.swap_remove(at);
                free.bytes -= buffer.capacity() * size_of::<T>();
                buffer
            }
            None => Vec::with_capacity(len),
        }
    }

    fn give(&self, buffer: Vec<T>) {
        let bytes = buffer.capacity() * size_of::<T>();
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > 0 && bytes <= KEPT_BYTES_MAX && free.bytes + bytes <= TOTAL_BYTES_MAX {
            free.bytes += bytes;
            free.buffers.push(buffer);
        }
    }
}

impl<T: Element> From<Vec<T>> for Buf<T> {
    /// A buffer that belongs to no pool.
    fn from(data: Vec<T>) -> Buf<T> {
        Buf { data, home: None }
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
        &self.data
    }
}

impl<T: Element> DerefMut for Buf<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data
    }
}

impl<T: Element> Default for Buf<T> {
    fn default() -> Self {
        Buf { data: Vec::new(), home: None }
    }
}

impl<T: Element + std::fmt::Debug> std::fmt::Debug for Buf<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.data.fmt(f)
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
    fn large_buffers_and_what_exceeds_the_limit_are_freed() {
        let scratch = Scratch::default();
        drop(scratch.zeroed::<i8>(KEPT_BYTES_MAX + 1));
        assert_eq!(scratch.i8.free.lock().unwrap().bytes, 0);
        let many: Vec<_> = (0..100).map(|_| scratch.zeroed::<i64>(100_000)).collect();
        drop(many);
        let free = scratch.i64.free.lock().unwrap();
        assert!(free.bytes <= TOTAL_BYTES_MAX && !free.buffers.is_empty());
    }
}
