#include <CLI/CLI.hpp>
int main(){return 0;}
