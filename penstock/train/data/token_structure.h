// What is known about the place of a token in its document, besides the token itself.
//
// Every member is a function of the document up to and including the token, so that a model that is given it
// learns nothing about the tokens it is to predict, and text that is being generated has the same structure
// as text that is read.
#pragma once

#include <cstdint>

namespace penstock::train {

struct TokenStructure {
  std::uint32_t parent_distance = 0;  // tokens back to the innermost open bracket; 0: there is none
  std::uint32_t sibling = 0;          // place among the elements of that bracket, or of the document, from 0
  std::uint32_t name = 0;             // in an identifier: hash of what has been read of it; 0: none
  std::uint16_t depth = 0;            // open brackets
  std::uint16_t level = 0;            // of the definition in the graph of dependencies
  std::uint8_t kind = 0;              // what the token is part of
  std::uint8_t node = 0;              // class of the token
  bool operator==(const TokenStructure&) const = default;
};

}  // namespace penstock::train
