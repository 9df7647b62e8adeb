#include "support/shapes.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace nvx::test {
namespace {

using schedule::Block;
using schedule::Collective;
using schedule::Layout;

size_t end_of(const std::vector<Block>& blocks) {
  size_t end = 0;
  for (const Block& b : blocks) end = std::max(end, b.end());
  return end;
}

const std::vector<Block>& of_rank(const std::vector<std::vector<Block>>& blocks, int rank) {
  return blocks[blocks.size() == 1 ? 0 : size_t(rank)];
}

bool is_loose(Blocks blocks) { return blocks == Blocks::kLoose || blocks == Blocks::kEqualLoose; }

/// Elements in each of n blocks.
std::vector<size_t> lengths(const ShapeRequest& request, std::mt19937_64& random) {
  const size_t n = size_t(request.size), each = request.elements / n;
  std::vector<size_t> lengths(n, each);
  for (size_t i = 0; i < n; ++i) {
    if (request.blocks == Blocks::kNearly) lengths[i] += i < request.elements % n;
    if (request.blocks == Blocks::kUneven || request.blocks == Blocks::kLoose) {
      lengths[i] = random() % 3 ? random() % (2 * each + 2) : 0;
    }
  }
  return lengths;
}

std::vector<Block> place(const std::vector<size_t>& lengths, const ShapeRequest& request, std::mt19937_64& random) {
  std::vector<size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  if (is_loose(request.blocks)) std::shuffle(order.begin(), order.end(), random);
  std::vector<Block> blocks(lengths.size());
  size_t at = 0;
  for (const size_t i : order) {
    if (is_loose(request.blocks)) at += random() % 3 * request.width;
    blocks[i] = {at, lengths[i] * request.width};
    at += blocks[i].bytes;
  }
  return blocks;
}

void lay_all_to_all(Shape& shape, const ShapeRequest& request, std::mt19937_64& random) {
  std::vector<std::vector<size_t>> sent;
  for (int rank = 0; rank < shape.size; ++rank) sent.push_back(lengths(request, random));
  for (size_t rank = 0; rank < size_t(shape.size); ++rank) {
    std::vector<size_t> received;
    for (const auto& by : sent) received.push_back(by[rank]);
    shape.to.push_back(place(sent[rank], request, random));
    shape.from.push_back(place(received, request, random));
  }
}

}  // namespace

Layout Shape::layout(int rank) const {
  Layout l{.size = size, .root = root, .width = width, .bytes = bytes, .blocks = blocks, .to = {}, .from = {}};
  if (!to.empty()) l.to = of_rank(to, rank), l.from = of_rank(from, rank);
  return l;
}

size_t Shape::input_bytes(int rank) const {
  switch (collective) {
    case Collective::kAllReduce:
    case Collective::kReduce: return bytes;
    case Collective::kBroadcast: return rank == root ? bytes : 0;
    case Collective::kReduceScatter: return end_of(blocks);
    case Collective::kScatter: return rank == root ? end_of(blocks) : 0;
    case Collective::kAllGather:
    case Collective::kGather: return blocks[size_t(rank)].bytes;
    case Collective::kAllToAll: return end_of(of_rank(to, rank));
    case Collective::kBarrier:
    case Collective::kNone: break;
  }
  return 0;
}

size_t Shape::output_bytes(int rank) const {
  size_t end = 0;
  for (const Due& due : contract(*this, rank)) end = std::max(end, due.output.end());
  return end;
}

std::string Shape::text() const {
  std::string text = std::string(name(collective)) + " of " + std::to_string(size) + " ranks, root " +
                     std::to_string(root) + ", elements of " + std::to_string(width) + " B, " + std::to_string(bytes) +
                     " B, blocks";
  for (const Block& b : to.empty() ? blocks : to[0]) {
    text += " " + std::to_string(b.offset) + "+" + std::to_string(b.bytes);
  }
  return text;
}

Shape shape_of(const ShapeRequest& request) {
  std::mt19937_64 random(request.seed);
  Shape shape{.collective = request.collective, .size = request.size, .root = request.root, .width = request.width};
  if (request.collective == Collective::kAllToAll) {
    lay_all_to_all(shape, request, random);
  } else if (has_blocks(request.collective)) {
    shape.blocks = place(lengths(request, random), request, random);
  } else if (request.collective != Collective::kBarrier) {
    shape.bytes = request.elements * request.width;
  } else {
    shape.width = 1;
  }
  return shape;
}

bool has_root(Collective c) {
  return c == Collective::kBroadcast || c == Collective::kReduce || c == Collective::kGather ||
         c == Collective::kScatter;
}

bool has_blocks(Collective c) {
  return c == Collective::kReduceScatter || c == Collective::kAllGather || c == Collective::kGather ||
         c == Collective::kScatter || c == Collective::kAllToAll;
}

std::vector<Due> contract(const Shape& s, int rank) {
  const auto all = [&](const std::vector<Block>& blocks) {
    std::vector<Due> due;
    for (int r = 0; r < s.size; ++r) due.push_back({blocks[size_t(r)], 0, r});
    return due;
  };
  const bool is_root = rank == s.root;
  switch (s.collective) {
    case Collective::kAllReduce: return {{{0, s.bytes}, 0, kEverybody}};
    case Collective::kReduce: return is_root ? std::vector<Due>{{{0, s.bytes}, 0, kEverybody}} : std::vector<Due>{};
    case Collective::kBroadcast: return {{{0, s.bytes}, 0, s.root}};
    case Collective::kReduceScatter:
    case Collective::kScatter: {
      const Block& own = s.blocks[size_t(rank)];
      return {{{0, own.bytes}, own.offset, s.collective == Collective::kScatter ? s.root : kEverybody}};
    }
    case Collective::kAllGather: return all(s.blocks);
    case Collective::kGather: return is_root ? all(s.blocks) : std::vector<Due>{};
    case Collective::kAllToAll: {
      std::vector<Due> due = all(of_rank(s.from, rank));
      for (Due& d : due) d.input_offset = of_rank(s.to, d.source)[size_t(rank)].offset;
      return due;
    }
    case Collective::kBarrier:
    case Collective::kNone: break;
  }
  return {};
}

Overlay overlay(const Shape& s, int rank) {
  switch (s.collective) {
    case Collective::kReduceScatter: return {.output = s.blocks[size_t(rank)].offset};
    case Collective::kScatter: return {.output = rank == s.root ? s.blocks[size_t(rank)].offset : 0};
    case Collective::kAllGather: return {.input = s.blocks[size_t(rank)].offset};
    case Collective::kGather: return {.input = rank == s.root ? s.blocks[size_t(rank)].offset : 0};
    case Collective::kAllToAll: return {.output = s.input_bytes(rank)};
    default: return {};
  }
}

}  // namespace nvx::test
