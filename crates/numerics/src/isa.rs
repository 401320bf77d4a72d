//! Instruction-set levels: which one the CPU has, and a proof value that it has it.

use std::fmt;
use std::str::FromStr;

use crate::simd::{HardwareTiles, MatrixTiles};

/// A set of instructions that kernels are written for, from the portable code upwards.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Level {
    /// Portable code; the reference.
    Scalar,
    /// AVX2 with FMA, F16C and POPCNT.
    Avx2,
    /// AVX2 with the 256-bit integer dot product.
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX-512 with the integer dot product.
    Avx512Vnni,
    /// AVX-512 with the integer dot product, and AMX int8 tiles for many rows.
    Amx,
}

impl Level {
    /// Every level, lowest first.
    pub const ALL: [Level; 6] =
        [Level::Scalar, Level::Avx2, Level::AvxVnni, Level::Avx512, Level::Avx512Vnni, Level::Amx];

    /// The name that `COLI_ISA` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::AvxVnni => "avxvnni",
            Level::Avx512 => "avx512",
            Level::Avx512Vnni => "avx512vnni",
            Level::Amx => "amx",
        }
    }

    /// Whether this CPU and operating system can run the level.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("popcnt");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        match self {
            Level::Scalar => true,
            Level::Avx2 => avx2,
            Level::AvxVnni => avx2 && is_x86_feature_detected!("avxvnni"),
            Level::Avx512 => avx512,
            Level::Avx512Vnni => avx512 && is_x86_feature_detected!("avx512vnni"),
            Level::Amx => Level::Avx512Vnni.is_available() && crate::simd::amx::is_permitted(),
        }
    }

    /// Whether this CPU can run the level; only the portable one on this architecture.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Level::Scalar
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Level, String> {
        Level::ALL.into_iter().find(|level| level.name() == text).ok_or_else(|| {
            let names: Vec<_> = Level::ALL.iter().map(|level| level.name()).collect();
            format!("unknown instruction-set level {text:?}; this build knows {}", names.join(", "))
        })
    }
}

/// A level that this CPU is known to have. Kernels take it by value: holding one is the proof
/// that their instructions may run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Isa(Level);

impl Isa {
    /// The portable level, which every CPU has.
    pub const SCALAR: Isa = Isa(Level::Scalar);

    /// The highest level of this CPU.
    pub fn detect() -> Isa {
        Level::ALL.into_iter().rev().find_map(Isa::at).unwrap_or(Isa::SCALAR)
    }

    /// The given level, if this CPU has it.
    pub fn at(level: Level) -> Option<Isa> {
        level.is_available().then_some(Isa(level))
    }

    /// All levels of this CPU, lowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Level::ALL.into_iter().filter_map(Isa::at)
    }

    /// Leave to multiply many int8 rows in matrix tiles, at a level that has them.
    pub const fn matrix_tiles(self) -> Option<MatrixTiles> {
        match self.0 {
            Level::Amx => Some(MatrixTiles::Hardware(HardwareTiles::proved())),
            _ => None,
        }
    }

    /// The level proved.
    pub const fn level(self) -> Level {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn level_names_round_trip() {
        for level in Level::ALL {
            assert_eq!(level.name().parse::<Level>(), Ok(level));
        }
        assert!("sse9".parse::<Level>().is_err());
    }

    #[test]
    fn the_detected_level_is_available() {
        assert!(Isa::detect().level().is_available());
    }
}
