// The options of the attention blocks of a model, and what follows from them without tensors.
//
//   AttentionOptions options{.width = 256, .heads = 8, .key_value_heads = 2, .layers = 6,
//                            .windows = {512, 512, 0}, .nope_layers = {2, 5}};
//   options = options.resolved();
//   options.window_of(3);                               // 512
//   for (const ParameterShape& shape : attention_shapes(options, "blocks.3.attention")) ...
//
// A layer is a block of the whole model, whatever its kind; indices count from the first one, also on a stage
// that holds later ones. Plain values, independent of LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/transformer_options.h"

namespace penstock::models {

// Where the numbers of the documents in a row come from.
enum class DocumentSource {
  None,      // a row is one document
  Given,     // an argument of forward, else the metadata; a row without both is one document
  BosTokens  // as Given; a row without both is split before each BOS token, except when a cache is used
};

struct AttentionOptions {
  std::int64_t width = 128;                    // elements of a hidden state
  std::int64_t heads = 4;                      // query heads
  std::int64_t key_value_heads = 0;            // 0: same as heads; fewer: each serves a group of query heads
  std::int64_t head_width = 0;                 // elements of a head; 0: width / heads
  std::int64_t layers = 1;                     // blocks of the whole model
  std::vector<std::int64_t> windows = {};      // tokens that a token sees, itself included; 0: all. Empty:
                                               // 0; one: for every layer; several: repeated over the layers
  std::vector<std::int64_t> nope_layers = {};  // layers without rotary positions
  double rope_theta = 10000;                   // base of the rotary frequencies
  std::int64_t context = 256;                  // the longest sequence
  DocumentSource documents = DocumentSource::Given;
  std::int64_t bos_token = 0;  // for DocumentSource::BosTokens: its number, at least 1

  bool operator==(const AttentionOptions&) const = default;

  // Returns the options with zeros replaced by their defaults. Throws ConfigError that names the invalid key
  // and the remedy.
  AttentionOptions resolved() const;
  void check() const { resolved(); }

  std::int64_t query_width() const { return heads * head_width; }          // of resolved options
  std::int64_t key_width() const { return key_value_heads * head_width; }  // of resolved options
  // The window of a layer; 0: none. Throws ValueError for a layer outside of the model.
  std::int64_t window_of(std::int64_t layer) const;
  bool has_positions(std::int64_t layer) const;  // whether queries and keys of a layer are rotated
};

// The attention of a transformer: one window, all layers with positions.
AttentionOptions attention_options(const TransformerOptions& options);

// Returns the parameters of one block; `prefix` is its name in the model ("blocks.3.attention").
std::vector<ParameterShape> attention_shapes(const AttentionOptions& options, const std::string& prefix);
// Returns the number of elements of the parameters of one block. All are used for every token.
std::int64_t attention_parameter_count(const AttentionOptions& options);
// Returns the floating-point operations of the matrix products of one layer per token in one forward, for
// sequences of `length`: two per multiply-add. Every key up to the window counts, also where it is masked.
double attention_flops_per_token(const AttentionOptions& options, std::int64_t layer, std::int64_t length);

}  // namespace penstock::models
