//! The matrix tiles of AMX: permission, set-up and the product of one block, in inline assembly.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

use super::{BlockProducts, Panel, TILE_ROWS_MAX};

/// Tile data in the extended state, as the kernel numbers it.
const XFEATURE_TILE_DATA: usize = 18;
/// `arch_prctl` request for an extended state.
const REQUEST_PERMISSION: usize = 0x1023;
/// Bits of XCR0 that say the system saves tile configuration and tile data.
const XCR0_TILES: u32 = 3 << 17;
/// Bits of CPUID leaf 7, EDX: tiles and their int8 products.
const CPUID_TILES: u32 = 3 << 24;
/// Rows of one tile register.
const TILE_ROWS: usize = 16;

/// Whether CPU, hypervisor and system let this process use int8 tiles. Asks the system for
/// permission, once.
pub fn is_permitted() -> bool {
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    *PERMITTED.get_or_init(|| has_tiles() && system_saves_tiles() && ask_permission())
}

fn has_tiles() -> bool {
    __cpuid_count(0, 0).eax >= 7 && __cpuid_count(7, 0).edx & CPUID_TILES == CPUID_TILES
}

fn system_saves_tiles() -> bool {
    /// CPUID leaf 1, ECX: XGETBV may be used.
    const OSXSAVE: u32 = 1 << 27;
    if __cpuid_count(1, 0).ecx & OSXSAVE == 0 {
        return false;
    }
    let low: u32;
    // SAFETY: the CPU and system support XGETBV, as just asked; it only writes EAX and EDX.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack));
    }
    low & XCR0_TILES == XCR0_TILES
}

/// The system hands out the large tile state only to processes that ask for it.
#[cfg(target_os = "linux")]
fn ask_permission() -> bool {
    const SYS_ARCH_PRCTL: usize = 158;
    let result: isize;
    // SAFETY: this request of arch_prctl takes a number and touches no memory of the process.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL => result,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") XFEATURE_TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack)
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn ask_permission() -> bool {
    false
}

/// Shapes of the tile registers, as LDTILECFG reads them.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Shapes the tiles of this thread for blocks of `words` words: registers 0 to 3 sums, 4 and 5
/// rows of activations, 6 and 7 weights.
///
/// # Safety
/// [`is_permitted`] must have said so.
pub unsafe fn begin(words: usize) {
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let rows_of_words = words.clamp(1, TILE_ROWS) as u8;
    for tile in 0..8 {
        let (rows, row_bytes) = match tile {
            0..4 => (TILE_ROWS as u8, 64),
            4..6 => (TILE_ROWS as u8, 4 * u16::from(rows_of_words)),
            _ => (rows_of_words, 64),
        };
        config.rows[tile] = rows;
        config.row_bytes[tile] = row_bytes;
    }
    // SAFETY: tiles may be used, as the caller promises; the instruction reads the 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) }
}

/// Gives the tile state back, which makes saving this thread's registers cheap again.
///
/// # Safety
/// [`is_permitted`] must have said so.
pub unsafe fn end() {
    // SAFETY: tiles may be used, as the caller promises.
    unsafe { asm!("tilerelease", options(nostack, nomem)) }
}

/// The products of [`super::TileSession::products`] in tiles.
///
/// # Safety
/// [`is_permitted`] must have said so, and [`begin`] must have been called with `words`.
pub unsafe fn block_products(words: usize, panels: &[Panel; 2], x: &[i8], out: &mut BlockProducts) {
    let stride = 4 * words;
    assert!(stride > 0 && words <= TILE_ROWS && x.len().is_multiple_of(TILE_ROWS * stride));
    let rows = x.len() / stride;
    assert!(rows > 0 && rows <= TILE_ROWS_MAX);
    let [low, high] = panels;
    let [out_low, out_high] = out;
    if rows == TILE_ROWS {
        // SAFETY: tiles are shaped as `begin` says; each load and store stays in its array: 16
        // rows of `stride` bytes of `x`, at most 16 words of 64 bytes of a panel, 16 rows of 64
        // bytes of `out`.
        unsafe {
            asm!(
                "tileloadd tmm4, [{x} + {stride}]",
                "tileloadd tmm6, [{low} + {line}]",
                "tileloadd tmm7, [{high} + {line}]",
                "tilezero tmm0",
                "tilezero tmm1",
                "tdpbssd tmm0, tmm4, tmm6",
                "tdpbssd tmm1, tmm4, tmm7",
                "tilestored [{out_low} + {line}], tmm0",
                "tilestored [{out_high} + {line}], tmm1",
                x = in(reg) x.as_ptr(),
                stride = in(reg) stride,
                line = in(reg) 64usize,
                low = in(reg) low.as_ptr(),
                high = in(reg) high.as_ptr(),
                out_low = in(reg) out_low.as_mut_ptr(),
                out_high = in(reg) out_high.as_mut_ptr(),
                options(nostack)
            );
        }
        return;
    }
    // SAFETY: as above, with 32 rows of `x` and of `out`.
    unsafe {
        asm!(
            "tileloadd tmm4, [{x} + {stride}]",
            "tileloadd tmm5, [{x_next} + {stride}]",
            "tileloadd tmm6, [{low} + {line}]",
            "tileloadd tmm7, [{high} + {line}]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tdpbssd tmm0, tmm4, tmm6",
            "tdpbssd tmm1, tmm4, tmm7",
            "tdpbssd tmm2, tmm5, tmm6",
            "tdpbssd tmm3, tmm5, tmm7",
            "tilestored [{out_low} + {line}], tmm0",
            "tilestored [{out_high} + {line}], tmm1",
            "tilestored [{out_low} + {line} + 1024], tmm2",
            "tilestored [{out_high} + {line} + 1024], tmm3",
            x = in(reg) x.as_ptr(),
            x_next = in(reg) x.as_ptr().wrapping_add(TILE_ROWS * stride),
            stride = in(reg) stride,
            line = in(reg) 64usize,
            low = in(reg) low.as_ptr(),
            high = in(reg) high.as_ptr(),
            out_low = in(reg) out_low.as_mut_ptr(),
            out_high = in(reg) out_high.as_mut_ptr(),
            options(nostack)
        );
    }
}

/// Multiplies tiles that stay in registers; returns the number of products.
///
/// # Safety
/// [`is_permitted`] must have said so.
pub unsafe fn multiply_loop(iterations: u64) -> u64 {
    if iterations == 0 {
        return 0;
    }
    // SAFETY: as the caller promises; the loop reads and writes tile registers only.
    unsafe {
        begin(TILE_ROWS);
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tilezero tmm4",
            "tilezero tmm5",
            "tilezero tmm6",
            "tilezero tmm7",
            "2:",
            "tdpbssd tmm0, tmm4, tmm6",
            "tdpbssd tmm1, tmm4, tmm7",
            "tdpbssd tmm2, tmm5, tmm6",
            "tdpbssd tmm3, tmm5, tmm7",
            "dec {left}",
            "jnz 2b",
            left = inout(reg) iterations => _,
            options(nostack, nomem)
        );
        end();
    }
    iterations * 4 * (TILE_ROWS * TILE_ROWS * 64) as u64
}
