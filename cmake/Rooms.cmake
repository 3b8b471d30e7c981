# penstock_room(<room> [HOT | COLD] [ALONE] SOURCES <files of that folder> [LINKS <targets>] [PRIVATE <targets>])
#
# One target per room, a folder of penstock/ with sources: comm/group is penstock_comm_group. What a room may use of other rooms is said in
# penstock/arrows.txt, which is read here: links follow the arrows. Rooms below its line "LibTorch" link LibTorch and share precompiled
# headers. In a unity build the rooms of a folder are compiled together, as one library: those with LibTorch, and those without.
#   HOT       has loops over elements, or runs for each operator: compiled with -O2. Others are compiled with -O1, which takes a
#             quarter less time
#   COLD      runs a few times in a process, and has no LibTorch: compiled without optimization, in a third less time
#   ALONE     needs a library that programs should not load for the sake of its neighbours: a library of its own
#   LINKS     other libraries that its headers need
#   PRIVATE   other libraries that its sources need

set(PENSTOCK_ROOMS "" CACHE INTERNAL "")

# Most of the time of a translation unit goes into headers. Several files as one unit build the library in a third of the time; a change of
# one file then compiles its neighbours again.
option(PENSTOCK_UNITY "Compile the files of a folder several at a time; OFF is better for working on them" ON)

function(penstock_use_unity target)
  if(PENSTOCK_UNITY)
    # In a unit of many files each of them counts as included, and classes with members of local types would be warned of.
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 64)
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()

# Reads the arrows into PENSTOCK_LINKS_OF_<room> and PENSTOCK_TORCH_ROOMS.
set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/penstock/arrows.txt)
file(STRINGS ${PROJECT_SOURCE_DIR}/penstock/arrows.txt penstock_arrows REGEX "^[^#]")
set(PENSTOCK_KNOWN_ROOMS)
set(PENSTOCK_TORCH_ROOMS)
set(penstock_below OFF)
foreach(line IN LISTS penstock_arrows)
  if(line MATCHES "^LibTorch")
    set(penstock_below ON)
  elseif(line MATCHES "^(header|namespace|also) ")
    # for the test
  elseif(line MATCHES "^([a-z/]+) +<-(.*)$")
    set(room ${CMAKE_MATCH_1})
    string(REGEX MATCHALL "[a-z/]+" links "${CMAKE_MATCH_2}")
    set(PENSTOCK_LINKS_OF_${room} ${links})
    list(APPEND PENSTOCK_KNOWN_ROOMS ${room})
    if(penstock_below)
      list(APPEND PENSTOCK_TORCH_ROOMS ${room})
    endif()
  else()
    message(FATAL_ERROR "penstock/arrows.txt: cannot read \"${line}\"; a line is \"room <- rooms\"")
  endif()
endforeach()

# penstock_library_of(<room> <variable>): the library that has the objects of a room, for properties of a target.
function(penstock_library_of room variable)
  string(REPLACE "/" "_" name ${room})
  get_target_property(library penstock_${name} PENSTOCK_LIBRARY)
  set(${variable} ${library} PARENT_SCOPE)
endfunction()

function(penstock_room room)
  cmake_parse_arguments(arg "HOT;COLD;ALONE" "" "SOURCES;LINKS;PRIVATE" ${ARGN})
  if(NOT room IN_LIST PENSTOCK_KNOWN_ROOMS)
    message(FATAL_ERROR "penstock_room(${room}): penstock/arrows.txt has no line for it; add one that says what it may include")
  endif()
  if(arg_COLD AND (arg_HOT OR room IN_LIST PENSTOCK_TORCH_ROOMS))
    message(FATAL_ERROR "penstock_room(${room}): COLD is for rooms without LibTorch that are not HOT: precompiled headers are made with -O1 or -O2")
  endif()
  set(heat "")
  if(arg_HOT)
    set(heat _hot)
  elseif(arg_COLD)
    set(heat _cold)
  endif()
  string(REPLACE "/" "_" name ${room})
  string(REGEX REPLACE "/.*" "" folder ${room})
  set(target penstock_${name})
  set(library ${target})
  if(PENSTOCK_UNITY AND NOT folder STREQUAL room AND NOT arg_ALONE)
    # Every unit parses the headers it shares with its neighbours, 2 s of a compiler's time, and those with LibTorch instantiate
    # the templates that its headers leave pending, 3 s: few large units.
    set(library penstock_${folder}_without_torch)
    if(room IN_LIST PENSTOCK_TORCH_ROOMS)
      set(library penstock_${folder}_with_torch)
    endif()
    string(APPEND library "${heat}")
    add_library(${target} INTERFACE)
    target_link_libraries(${target} INTERFACE ${library})
  endif()
  if(NOT TARGET ${library})
    penstock_make_library(${library} ${room} "${heat}")
  endif()
  set_target_properties(${target} PROPERTIES PENSTOCK_LIBRARY ${library})
  list(TRANSFORM arg_SOURCES PREPEND ${PROJECT_SOURCE_DIR}/penstock/${room}/ REGEX "^[^/]")
  target_sources(${library} PRIVATE ${arg_SOURCES})
  foreach(link IN LISTS PENSTOCK_LINKS_OF_${room})
    string(REPLACE "/" "_" link penstock_${link})
    set(needed ${link})
    if(NOT library STREQUAL target)
      target_link_libraries(${target} INTERFACE ${link})
      if(TARGET ${link})
        get_target_property(needed ${link} PENSTOCK_LIBRARY)
      endif()
    endif()
    if(needed STREQUAL "${library}")
      continue()
    endif()
    target_link_libraries(${library} PUBLIC ${needed})
    # The rooms of a folder that are compiled differently use each other.
    string(REGEX REPLACE "_(hot|cold)$" "" kind ${library})
    if(needed MATCHES "^${kind}(_hot|_cold)?$")
      target_link_libraries(${needed} PUBLIC ${library})
    endif()
  endforeach()
  target_link_libraries(${library} PUBLIC ${arg_LINKS} PRIVATE ${arg_PRIVATE})
  # All rooms of a folder together, for tests and programs of this tree.
  if(NOT folder STREQUAL room)
    if(NOT TARGET penstock_${folder})
      add_library(penstock_${folder} INTERFACE)
    endif()
    target_link_libraries(penstock_${folder} INTERFACE ${target})
  endif()
endfunction()

# penstock_cuda_sources(<room> <with> <without>): sources of a room that depend on CUDA, one variant with it, one without.
function(penstock_cuda_sources room with without)
  penstock_library_of(${room} target)
  if(PENSTOCK_HAVE_CUDA)
    list(TRANSFORM with PREPEND ${PROJECT_SOURCE_DIR}/penstock/${room}/)
    target_sources(${target} PRIVATE ${with})
  else()
    list(TRANSFORM without PREPEND ${PROJECT_SOURCE_DIR}/penstock/${room}/)
    target_sources(${target} PRIVATE ${without})
  endif()
endfunction()

set(penstock_fmt_instances ${PROJECT_SOURCE_DIR}/penstock/base/fmt_instances.h)

function(penstock_make_library library room heat)
  add_library(${library} STATIC)
  target_include_directories(${library} PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR}/generated)
  target_compile_features(${library} PUBLIC cxx_std_20)
  target_link_libraries(${library} PRIVATE penstock_flags)
  penstock_use_unity(${library})
  if(room IN_LIST PENSTOCK_TORCH_ROOMS)
    target_link_libraries(${library} PUBLIC penstock_libtorch)
    penstock_use_torch_library_header(${library} "${heat}")
  else()
    target_compile_options(${library} PRIVATE "SHELL:-include ${penstock_fmt_instances}")
  endif()
  if(heat STREQUAL "_cold" AND CMAKE_BUILD_TYPE STREQUAL "Release")
    target_compile_options(${library} PRIVATE -O0)
  elseif(NOT heat AND NOT room IN_LIST PENSTOCK_TORCH_ROOMS)
    penstock_optimize_little(${library})
  endif()
  set(PENSTOCK_ROOMS ${PENSTOCK_ROOMS} ${library} CACHE INTERNAL "")
endfunction()

# Precompiled headers must be made with the same: g++ 12 compiles functions as its precompiled header was made, whatever the command line
# says, and newer ones refuse it.
function(penstock_optimize_little target)
  if(CMAKE_BUILD_TYPE STREQUAL "Release")
    target_compile_options(${target} PRIVATE -O1 -Wno-maybe-uninitialized)  # at -O1 g++ 12 takes checked optionals for uninitialized ones
  endif()
endfunction()

# Precompiled Torch headers, each built once. A translation unit costs 13 s without; what it costs with one depends on how many
# templates the header leaves to be instantiated at the end of every unit: 3 s with what the library needs (tensors, dispatcher,
# autograd functions), 7 s with all of torch/torch.h (modules, optimizers), which programs and tests use. Tests and examples are
# compiled without optimization, which halves what they cost, and benchmarks with little; the library they use is not.
function(penstock_use_torch_header target)
  penstock_precompiled_little(${target} penstock_torch_header <torch/torch.h> <torch/library.h>
                              <torch/csrc/distributed/c10d/Store.hpp> ${penstock_fmt_instances} <spdlog/spdlog.h>)
endfunction()

function(penstock_use_torch_test_header target)
  penstock_precompiled(${target} penstock_torch_test_header <torch/torch.h> <torch/library.h>
                       <torch/csrc/distributed/c10d/Store.hpp> ${penstock_fmt_instances} <spdlog/spdlog.h> <gtest/gtest.h>)
  foreach(user IN ITEMS penstock_torch_test_header ${target})
    target_link_libraries(${user} PRIVATE GTest::gtest)  # g++ refuses a precompiled header made under other definitions
  endforeach()
  set_property(TARGET penstock_torch_test_header APPEND PROPERTY COMPILE_OPTIONS -O0)
  target_compile_options(${target} PRIVATE -O0)
endfunction()

function(penstock_use_torch_example_header target)
  if(TARGET GTest::gtest)  # the header of the tests has it
    penstock_use_torch_test_header(${target})
  else()
    penstock_use_torch_header(${target})
  endif()
endfunction()

function(penstock_use_torch_library_header target heat)
  set(headers <ATen/ATen.h> <torch/library.h> <torch/csrc/autograd/custom_function.h> <torch/nn/module.h>
              <torch/csrc/distributed/c10d/Store.hpp> ${penstock_fmt_instances} <spdlog/spdlog.h>)
  if(heat)
    penstock_precompiled(${target} penstock_torch_hot_header ${headers})
  else()
    penstock_precompiled_little(${target} penstock_torch_library_header ${headers})
  endif()
endfunction()

# For targets with little optimization, and so is the header.
function(penstock_precompiled_little target header)
  if(TARGET ${header})
    penstock_precompiled(${target} ${header})
  else()
    penstock_precompiled(${target} ${header} ${ARGN})
    penstock_optimize_little(${header})
  endif()
  penstock_optimize_little(${target})
endfunction()

function(penstock_precompiled target header)
  if(NOT TARGET ${header})
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/${header}.cpp CONTENT "// Carries a precompiled header.\n")  # only written when it differs
    add_library(${header} OBJECT ${PROJECT_BINARY_DIR}/generated/${header}.cpp)
    target_link_libraries(${header} PRIVATE penstock_flags penstock_libtorch fmt::fmt spdlog::spdlog)
    target_precompile_headers(${header} PRIVATE ${ARGN})
  endif()
  # CMake compiles executables with -fPIE and libraries with -fPIC, and g++ refuses a precompiled header made under the
  # other flag; so everything that shares it is compiled as for a library.
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_link_libraries(${target} PRIVATE fmt::fmt spdlog::spdlog)
  target_precompile_headers(${target} REUSE_FROM ${header})
endfunction()
