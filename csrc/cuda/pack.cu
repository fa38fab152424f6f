#include "megarl/pack.h"

#include "megarl/device.h"

namespace megarl::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kWantedBlocks = 4096;  // some waves of blocks, so that the last one is short
constexpr int64_t kMostTiles = 4;        // a block: they share one search of the table

// What happens to elements between load and store.
enum class Move { kCopy, kNarrow, kWiden };

template <int kBytes>
constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;

// kBytes of memory (1, 2 or a multiple of 4) as words, 16 bytes an access where there are as many.
template <int kBytes>
__device__ __forceinline__ void load(const char* from, uint32_t (&words)[kWords<kBytes>]) {
  if constexpr (kBytes >= 16) {
#pragma unroll
    for (int k = 0; k < kBytes / 16; ++k) {
      const uint4 q = load_once(reinterpret_cast<const uint4*>(from) + k);
      words[4 * k] = q.x;
      words[4 * k + 1] = q.y;
      words[4 * k + 2] = q.z;
      words[4 * k + 3] = q.w;
    }
  } else if constexpr (kBytes == 8) {
    const uint2 q = __ldcs(reinterpret_cast<const uint2*>(from));
    words[0] = q.x;
    words[1] = q.y;
  } else if constexpr (kBytes == 4) {
    words[0] = __ldcs(reinterpret_cast<const unsigned int*>(from));
  } else if constexpr (kBytes == 2) {
    words[0] = __ldcs(reinterpret_cast<const unsigned short*>(from));
  } else {
    words[0] = __ldcs(reinterpret_cast<const unsigned char*>(from));
  }
}

template <int kBytes>
__device__ __forceinline__ void store(char* to, const uint32_t (&words)[kWords<kBytes>]) {
  if constexpr (kBytes >= 16) {
#pragma unroll
    for (int k = 0; k < kBytes / 16; ++k)
      store_once(reinterpret_cast<uint4*>(to) + k,
                 uint4{words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]});
  } else if constexpr (kBytes == 8) {
    __stcs(reinterpret_cast<uint2*>(to), uint2{words[0], words[1]});
  } else if constexpr (kBytes == 4) {
    __stcs(reinterpret_cast<unsigned int*>(to), words[0]);
  } else if constexpr (kBytes == 2) {
    __stcs(reinterpret_cast<unsigned short*>(to), static_cast<unsigned short>(words[0]));
  } else {
    __stcs(reinterpret_cast<unsigned char*>(to), static_cast<unsigned char>(words[0]));
  }
}

// kUnit elements that one thread moves at once; for a copy an element is a byte.
template <Move kMove, int kUnit>
struct Unit {
  static constexpr int kFrom = kUnit * (kMove == Move::kCopy ? 1 : kMove == Move::kNarrow ? 4 : 2);
  static constexpr int kTo = kUnit * (kMove == Move::kCopy ? 1 : kMove == Move::kNarrow ? 2 : 4);
  static constexpr int kAhead = kFrom >= 32 ? 2 : kFrom >= 8 ? 4 : 8;  // loads before a store
  uint32_t in[kWords<kFrom>];

  __device__ __forceinline__ void load(const char* from) { cuda::load<kFrom>(from, in); }

  __device__ __forceinline__ void store(char* to) const {
    if constexpr (kMove == Move::kCopy) {
      cuda::store<kTo>(to, in);
    } else {
      uint32_t out[kWords<kTo>];
      if constexpr (kMove == Move::kNarrow) {
#pragma unroll
        for (int k = 0; k < kUnit; k += 2)
          out[k / 2] = pack_bf16x2(__uint_as_float(in[k]),
                                   kUnit > 1 ? __uint_as_float(in[k + (kUnit > 1)]) : 0.f);
      } else {
#pragma unroll
        for (int k = 0; k < kUnit; ++k)
          out[k] = k % 2 ? in[k / 2] & 0xffff0000u : in[k / 2] << 16;
      }
      cuda::store<kTo>(to, out);
    }
  }
};

// One side of a box: its first byte, and the bytes from row to row.
template <typename Byte>
struct Side {
  Byte* start;
  int64_t row_stride;
};

// Where a unit lies. Steps of kThreads units need no division but the first.
struct Place {
  uint32_t row, column, row_step, column_step, units_per_row;

  __device__ __forceinline__ Place(uint32_t unit, uint32_t units_per_row)
      : row(unit / units_per_row), column(unit - row * units_per_row),
        row_step(kThreads / units_per_row),
        column_step(kThreads - row_step * units_per_row), units_per_row(units_per_row) {}

  __device__ __forceinline__ void step() {
    row += row_step;
    column += column_step;
    if (column >= units_per_row) {
      column -= units_per_row;
      ++row;
    }
  }

  template <typename Byte>
  __device__ __forceinline__ Byte* in(const Side<Byte>& side, int unit_bytes) const {
    return side.start + row * side.row_stride + static_cast<int64_t>(column) * unit_bytes;
  }
};

// The units [unit, end) that fall to this thread, kThreads apart; `unit` is at `place`.
template <Move kMove, int kUnit>
__device__ __forceinline__ void move_units(Side<const char> from, Side<char> to, Place place,
                                       uint32_t unit, uint32_t end) {
  using Mover = Unit<kMove, kUnit>;
  constexpr uint32_t kLast = (Mover::kAhead - 1) * kThreads;
  // Not one loop with conditions: under a condition a register stays taken from before the load.
#pragma unroll 1
  for (; unit + kLast < end; unit += Mover::kAhead * kThreads) {
    Mover movers[Mover::kAhead];
    Place load_at = place;
#pragma unroll
    for (int k = 0; k < Mover::kAhead; ++k) {
      movers[k].load(load_at.in(from, Mover::kFrom));
      load_at.step();
    }
#pragma unroll
    for (int k = 0; k < Mover::kAhead; ++k) {
      movers[k].store(place.in(to, Mover::kTo));
      place.step();
    }
  }
#pragma unroll 1
  for (; unit < end; unit += kThreads) {
    Mover mover;
    mover.load(place.in(from, Mover::kFrom));
    mover.store(place.in(to, Mover::kTo));
    place.step();
  }
}

// One tile of a box, by all threads of the block.
template <Move kMove>
__device__ __forceinline__ void move_tile(const PackedBox& box, uint32_t tile,
                                          const Side<const char>& from, const Side<char>& to) {
  const int unit_log2 = static_cast<int>(box.unit_log2);
  const uint32_t units_per_row = static_cast<uint32_t>(box.columns >> unit_log2);
  const uint32_t units = units_per_row * static_cast<uint32_t>(box.rows);
  const uint32_t tile_units = static_cast<uint32_t>(box.tile_units);
  const uint32_t begin = tile * tile_units;
  const uint32_t end = units - begin < tile_units ? units : begin + tile_units;
  const uint32_t unit = begin + threadIdx.x;
  if (unit < end) {
    const Place place(unit, units_per_row);
    switch (unit_log2) {
      case 4:
        if constexpr (kMove == Move::kCopy) move_units<kMove, 16>(from, to, place, unit, end);
        break;
      case 3: move_units<kMove, 8>(from, to, place, unit, end); break;
      case 2: move_units<kMove, 4>(from, to, place, unit, end); break;
      case 1: move_units<kMove, 2>(from, to, place, unit, end); break;
      default: move_units<kMove, 1>(from, to, place, unit, end);
    }
  }
  // A single row may end in less than a unit.
  const int64_t element = (static_cast<int64_t>(units_per_row) << unit_log2) + threadIdx.x;
  if (end == units && element < box.columns) {
    using One = Unit<kMove, 1>;
    One one;
    one.load(from.start + element * One::kFrom);
    one.store(to.start + element * One::kTo);
  }
}

__device__ __forceinline__ void move_box_tile(const PackBoxes& args, const PackedBox& box,
                                              uint32_t tile) {
  char* in_tensor = reinterpret_cast<char*>(box.pointer);
  char* in_bucket = args.bucket + box.offset;
  const int64_t element = box.cast == BoxCast::kCopy                ? 1
                          : box.cast == BoxCast::kFloat32ToBFloat16 ? 2
                                                                    : 4;
  const int64_t dense = box.columns * element;
  const Side<const char> from = args.to_bucket ? Side<const char>{in_tensor, box.row_stride}
                                               : Side<const char>{in_bucket, dense};
  const Side<char> to =
      args.to_bucket ? Side<char>{in_bucket, dense} : Side<char>{in_tensor, box.row_stride};
  if (box.cast == BoxCast::kCopy) {
    move_tile<Move::kCopy>(box, tile, from, to);
  } else if ((box.cast == BoxCast::kFloat32ToBFloat16) == args.to_bucket) {
    move_tile<Move::kNarrow>(box, tile, from, to);
  } else {
    move_tile<Move::kWiden>(box, tile, from, to);
  }
}

// Each block does `tiles_per_block` tiles in a row: one search for the first, then a walk.
__global__ void __launch_bounds__(kThreads) pack_kernel(PackBoxes args, int64_t tiles_per_block) {
  const int64_t begin = blockIdx.x * tiles_per_block;
  const int64_t end = min(begin + tiles_per_block, args.num_tiles);
  int64_t low = 0, high = args.num_boxes;  // the last box that begins at or before `begin`
#pragma unroll 1
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (args.first_tiles[middle] <= begin) {
      low = middle;
    } else {
      high = middle;
    }
  }
#pragma unroll 1
  for (int64_t tile = begin; tile < end; ++tile) {
    if (tile == args.first_tiles[low + 1]) ++low;
    move_box_tile(args, args.boxes[low], static_cast<uint32_t>(tile - args.first_tiles[low]));
  }
}

}  // namespace

int pack_boxes(const PackBoxes& args, void* stream) {
  if (args.num_tiles == 0) return 0;
  const int64_t wanted = args.num_tiles / kWantedBlocks;
  const int64_t tiles = wanted < 1 ? 1 : wanted < kMostTiles ? wanted : kMostTiles;
  const dim3 grid(static_cast<unsigned>((args.num_tiles + tiles - 1) / tiles));
  MEGARL_LAUNCH(pack_kernel, grid, dim3(kThreads), 0, stream, args, tiles);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace megarl::cuda
